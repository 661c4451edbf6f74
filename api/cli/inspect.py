"""`onecopy inspect`: a model's price list on this machine: what its rows cost, how much fits, what it can do."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onecopy.runtime.rows.layout import BLOCK, LayerLayout, Layout, RowTensor
from onecopy.runtime.rows.pricing import conversation_bytes, conversations_that_fit, largest_prompt

from .flags import add_arithmetic_flags, count, size
from .models import human, table
from .terminal import busy

if TYPE_CHECKING:
    from onecopy.runtime.models import Loaded
    from onecopy.runtime.text.chat import ChatFormat

LENGTHS = (1024, 4096, 16384, 65536)
"""Rows of a conversation to price when none are asked for."""

Line = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Facts:
    """What was found about a model. exactness: the self-check's verdict and reasons. The other facts are in words.

    stored: how the source stores weights; dtype: what they became. quantized: what quantized rows do, if asked for.
    """

    name: str
    kind: str
    nbytes: int
    path: str
    stored: str
    dtype: str
    context: int
    layout: Layout
    exactness: str
    drafts: str
    tools: str
    thinking: str
    text: str
    quantized: str = ""


def add_inspect_command(subparsers: Any) -> None:
    parser = subparsers.add_parser("inspect", help="what a model costs and can do on this machine")
    parser.add_argument("model", nargs="?", default="smollm2", help="bundled name, directory or GGUF file (smollm2)")
    parser.add_argument("--memory", type=size, metavar="SIZE", help="memory for conversations, e.g. 8GB")
    parser.add_argument("--tokens", type=count, action="append", metavar="N", help="a length to price; repeatable")
    add_arithmetic_flags(parser)
    parser.add_argument("--no-load", action="store_true", help="only what the headers say")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.no_load:
        table(("what", "value"), list(_headers(args.model)))
        return 0
    with busy(f"loading {args.model}"):
        facts, budget = _look(args.model, args.memory, args.kv_bits, args.fast)
    table(("what", "value"), [*model_lines(facts), *price_lines(facts, budget, args.tokens or LENGTHS)])
    return 0


def _headers(model: str) -> Iterator[Line]:
    from onecopy.runtime.models import resolve

    source = resolve(model)
    yield "name", source.id
    yield "kind", source.kind
    yield "size", human(source.nbytes)
    yield "path", str(source.path)


def _look(model: str, memory: int | None, kv_bits: int | None, fast: bool) -> tuple[Facts, int]:
    """Loads the model as a server would: what it is, and the bytes a server would give to rows."""
    from onecopy.actors.service import Options
    from onecopy.actors.system import rows_budget
    from onecopy.runtime import blas
    from onecopy.runtime.drafting import drafter_for
    from onecopy.runtime.engine import Engine
    from onecopy.runtime.models import load, resolve
    from onecopy.runtime.seams.clock import RealClock
    from onecopy.runtime.seams.machine import RealMachine
    from onecopy.runtime.text.chat import ChatFormat

    blas.install()
    source = resolve(model)
    loaded = load(model)
    drafter = drafter_for(loaded)
    now = RealClock().now
    engine = Engine.open(loaded, context=loaded.context, stopwatch=now, fast=fast, drafter=drafter, kv_bits=kv_bits)
    tokenizer, template = loaded.tokenizer, loaded.template
    chat = ChatFormat(tokenizer, template) if tokenizer is not None and template is not None else None
    facts = Facts(
        name=loaded.id,
        kind=loaded.kind,
        nbytes=source.nbytes,
        path=str(source.path),
        stored=loaded.stored,
        dtype=loaded.dtype,
        context=loaded.context,
        layout=engine.layout,
        exactness=engine.verdict,
        drafts=_drafts(loaded, drafter is not None),
        tools=_tools(chat),
        thinking=_thinking(chat),
        text=loaded.text,
        quantized=str(engine.fidelity or ""),
    )
    return facts, rows_budget(Options(model=model, memory=memory), RealMachine())


def _drafts(loaded: Loaded, used: bool) -> str:
    copies = "from copies of the conversation"
    if used:
        return f"{copies}, and by the prediction head of the checkpoint"
    brought = loaded.draft_head or getattr(loaded.model, "mtp", None) is not None
    return f"{copies}; the checkpoint's prediction head is not used" if brought else copies


def _tools(chat: ChatFormat | None) -> str:
    if chat is None:
        return "none: the model has no chat template"
    if chat.tool_format_name is None:
        return "rendered by its template, which writes calls in a way that cannot be read"
    told = "rendered by its template" if chat.knows_tools else "described in the system message"
    return f"{told}, calls written as {chat.tool_format_name}"


def _thinking(chat: ChatFormat | None) -> str:
    if chat is None or chat.tags is None:
        return "no"
    opened = ", opened by the prompt" if chat.thinking_opened_by_prompt else ""
    return f"{chat.tags.open} to {chat.tags.close}{opened}"


# --- lines


def model_lines(facts: Facts) -> Iterator[Line]:
    yield "name", facts.name
    yield "kind", facts.kind
    yield "size", human(facts.nbytes)
    yield "path", facts.path
    yield "weights", f"{facts.stored}, held as {facts.dtype}"
    yield "context", f"{facts.context} tokens"
    yield "exactness", facts.exactness
    yield "quantized rows", facts.quantized or "no: rows are as the model computes them"
    yield "drafts", facts.drafts
    yield "text", facts.text
    yield "tools", facts.tools
    yield "thinking", facts.thinking


def price_lines(facts: Facts, budget: int, lengths: tuple[int, ...] | list[int]) -> Iterator[Line]:
    layout = facts.layout
    yield from layer_lines(layout)
    yield "per row", human(layout.row_bytes)
    yield f"per block of {BLOCK} rows", human(layout.block_bytes)
    yield "per anchor", human(layout.state_bytes) if layout.recurrent else "needs none"
    for n in lengths:
        if n <= facts.context:
            fit = conversations_that_fit(layout, n, budget)
            yield f"{n} tokens", f"{human(conversation_bytes(layout, n))} each, {fit} fit"
    yield "memory for rows", human(budget)
    yield "largest prompt", f"{min(largest_prompt(layout, budget), facts.context - 1)} tokens"


def layer_lines(layout: Layout) -> Iterator[Line]:
    """One line for each kind of layer: how many, and what a row of one is made of."""
    for layer, n in Counter(layout.layers).items():
        yield f"{n} {layer.kind} layers", ", ".join(_parts(layer))


def _parts(layer: LayerLayout) -> Iterator[str]:
    if layer.bits is not None:
        yield f"{layer.bits} bits"
    if layer.window is not None:
        yield f"window {layer.window}"
    yield from (f"{_shape(t)} a row" for t in layer.rows)
    yield from (f"{_shape(t)} every {layer.ratio} rows" for t in layer.pooled)
    if layer.anchor_bytes:
        yield f"state {human(layer.anchor_bytes)}"


def _shape(t: RowTensor) -> str:
    return f"{t.name} {t.heads}x{t.width}x{t.itemsize}B"
