"""`onecopy inspect`: the price list says what the layout says, and what fits really fits."""

from __future__ import annotations

from pathlib import Path

import pytest
from onecopy.api import cli
from onecopy.api.cli.inspect import Facts, layer_lines, price_lines
from onecopy.api.cli.models import human
from onecopy.runtime.rows.layout import LayerLayout, Layout, RowTensor
from onecopy.runtime.rows.pricing import conversation_bytes

from tests.support.published import write_published, write_quantized
from tests.support.qwen4_tiny import write_served
from tests.support.system import write_tiny

ROWS = (RowTensor("k", 2, 64, 2), RowTensor("v", 2, 64, 2))
MIXED = Layout(
    (
        LayerLayout("recurrent", anchor_bytes=4096),
        LayerLayout("recurrent", anchor_bytes=4096),
        LayerLayout("window", ROWS, window=512),
        LayerLayout("qsa", (*ROWS, RowTensor("i", 1, 64, 2)), (RowTensor("p", 1, 64, 2),), 4),
    )
)


def facts(layout: Layout, context: int = 8192) -> Facts:
    return Facts("m", "hf", 1, "/m", "plain", "native", context, layout, "exact", "none", "none", "no", "no")


def prices(layout: Layout, budget: int, *lengths: int, context: int = 8192) -> dict[str, str]:
    return dict(price_lines(facts(layout, context), budget, list(lengths)))


def test_layers_are_counted_by_what_they_keep() -> None:
    assert dict(layer_lines(MIXED)) == {
        "2 recurrent layers": "state 4.0 KiB",
        "1 window layers": "window 512, k 2x64x2B a row, v 2x64x2B a row",
        "1 qsa layers": "k 2x64x2B a row, v 2x64x2B a row, i 1x64x2B a row, p 1x64x2B every 4 rows",
    }


def test_the_price_list_is_the_layouts() -> None:
    budget = 10 * conversation_bytes(MIXED, 1000)
    found = prices(MIXED, budget, 1000)
    assert found["per row"] == human(MIXED.row_bytes)
    assert found["per anchor"] == "8.0 KiB"
    assert found["1000 tokens"] == f"{human(conversation_bytes(MIXED, 1000))} each, 10 fit"


def test_an_attention_model_needs_no_anchors() -> None:
    assert prices(Layout((LayerLayout("attention", ROWS),)), 1 << 20)["per anchor"] == "needs none"


def test_the_largest_prompt_leaves_a_row_for_the_answer_and_stays_within_the_context() -> None:
    layout = Layout((LayerLayout("attention", ROWS),))
    assert prices(layout, 3 * layout.block_bytes)["largest prompt"] == "767 tokens"
    assert prices(layout, 1 << 40)["largest prompt"] == "8191 tokens"


def test_lengths_past_the_context_are_not_priced() -> None:
    found = prices(MIXED, 1 << 30, 1024, 16384)
    assert "1024 tokens" in found
    assert "16384 tokens" not in found


def test_a_model_is_inspected_as_a_server_would_load_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny(tmp_path / "tiny")
    assert cli.main(["inspect", str(model), "--memory", "8GB", "--tokens", "500"]) == 0
    found = dict(line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert found["name"] == "tiny"
    assert "2 attention layers" in found
    assert found["exactness"].startswith(("exact", "not exact"))
    assert found["tools"] == "described in the system message, calls written as json_tools"
    assert found["thinking"] == "no"
    assert found["text"] == "prompts and chats"
    assert found["weights"] == "plain floats, held as float32"
    assert "500 tokens" in found


def test_fast_arithmetic_is_told_as_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(write_tiny(tmp_path / "tiny")), "--memory", "8GB", "--fast"]) == 0
    found = dict(line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert found["exactness"].startswith("not exact: chosen by --fast")


def test_quantized_rows_are_priced_and_what_they_do_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny(tmp_path / "wide", head_dim=64)
    found = {}
    for flags in ([], ["--kv-bits", "8"]):
        assert cli.main(["inspect", str(model), "--memory", "8GB", *flags]) == 0
        found[len(flags)] = dict(line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert found[0]["quantized rows"] == "no: rows are as the model computes them"
    assert found[0]["2 attention layers"] == "kv 4x64x4B a row"
    assert found[2]["quantized rows"].startswith(
        "8 bits in 2 of 2 layers; over 320 tokens the most likely next token is"
    )
    assert found[2]["2 attention layers"] == "8 bits, kv 4x64x1B a row, kv.scales 4x1x4B a row, kv.biases 4x1x4B a row"
    assert (found[0]["per row"], found[2]["per row"]) == ("2.0 KiB", "576 B")


def test_an_indexed_model_is_inspected_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_served(tmp_path / "indexed")
    assert cli.main(["inspect", str(model), "--memory", "8GB", "--tokens", "500"]) == 0
    found = dict(line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert found["1 qsa layers"].endswith("i 1x32x4B a row, p 1x32x4B every 4 rows")
    assert found["exactness"] == "exact"
    assert found["drafts"] == "from copies of the conversation"
    assert {"per row", "per anchor", "500 tokens", "largest prompt", "tools", "thinking"} <= set(found)


def test_a_head_that_is_not_used_is_said_not_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(write_published(tmp_path / "p")), "--memory", "8GB"]) == 0
    found = dict(line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert found["drafts"] == "from copies of the conversation; the checkpoint's prediction head is not used"


def test_a_quantized_directory_without_a_tokenizer_says_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", str(write_quantized(tmp_path / "q", tokenizer=False)), "--memory", "8GB"]) == 0
    found = dict(line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert found["weights"] == "4 bits in groups of 64, held as float32"
    assert found["text"].startswith("none: prompts are token ids")


def test_headers_alone_are_read_without_loading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny(tmp_path / "tiny")
    (model / "model.safetensors").write_bytes(b"\0" * 64)
    assert cli.main(["inspect", str(model), "--no-load"]) == 0
    assert "kind\thf" in capsys.readouterr().out
