"""Metrics as Prometheus text: names that vLLM dashboards know, and our own under `onecopy_`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from .meter import BOUNDS, Histogram, Meter

Line = tuple[str, str, Mapping[str, str], float]
"""name, type, labels, value."""

_UNSAFE = re.compile(r"[^a-zA-Z0-9_]")
COUNTERS = {
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:prefix_cache_queries_total": "prompt_tokens",
    "vllm:prefix_cache_hits_total": "cached_tokens",
    "vllm:spec_decode_num_draft_tokens_total": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted_tokens",
    "onecopy_rows_adopted_total": "rows_adopted",
    "onecopy_rows_forked_total": "rows_forked",
    "onecopy_rows_restored_total": "rows_restored",
    "onecopy_rows_prefilled_total": "rows_prefilled",
    "onecopy_bytes_copied_total": "bytes_copied",
    "onecopy_bytes_written_total": "bytes_written",
    "onecopy_rounds_total": "rounds",
    "onecopy_compiled_rounds_total": "compiled_rounds",
    "onecopy_reasoning_tokens_total": "reasoning_tokens",
}


def exposition(meter: Meter, owned: Mapping[str, Any], model: str) -> str:
    """All metrics in the text format. owned: the system's own numbers, nested by owner."""
    lines: list[str] = []
    typed: set[str] = set()
    label = {"model_name": model}
    for name, kind, labels, value in [*_doors(meter, label), *_flat("onecopy", owned)]:
        family = (
            name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") if kind == "histogram" else name
        )
        if family not in typed:
            typed.add(family)
            lines.append(f"# TYPE {family} {kind}")
        lines.append(f"{name}{_labels(labels)} {_number(value)}")
    return "\n".join(lines) + "\n"


def _doors(meter: Meter, label: Mapping[str, str]) -> Iterator[Line]:
    yield "vllm:num_requests_running", "gauge", label, meter.running
    yield "vllm:num_requests_waiting", "gauge", label, meter.waiting
    for name, key in COUNTERS.items():
        yield name, "counter", label, meter.totals[key]
    for reason, number in sorted(meter.finished.items()):
        yield "vllm:request_success_total", "counter", {**label, "finished_reason": reason}, number
    for code, number in sorted(meter.failed.items()):
        yield "onecopy_request_errors_total", "counter", {**label, "code": code}, number
    yield from _histogram("vllm:time_to_first_token_seconds", meter.first_token, label)
    yield from _histogram("vllm:time_per_output_token_seconds", meter.token_gap, label)
    yield from _histogram("vllm:e2e_request_latency_seconds", meter.whole, label)


def _histogram(name: str, values: Histogram, label: Mapping[str, str]) -> Iterator[Line]:
    below = 0
    for bound, number in zip((*map(str, BOUNDS), "+Inf"), values.counts, strict=True):
        below += number
        yield f"{name}_bucket", "histogram", {**label, "le": bound}, below
    yield f"{name}_sum", "histogram", label, values.total
    yield f"{name}_count", "histogram", label, below


def _flat(prefix: str, value: Any) -> Iterator[Line]:
    """Numbers of a nested mapping, named by their path; anything else is left out."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{prefix}_{_UNSAFE.sub('_', str(key))}", inner)
    elif isinstance(value, (int, float)):
        yield prefix, "counter" if prefix.endswith("_total") else "gauge", {}, float(value)


def _labels(labels: Mapping[str, str]) -> str:
    inner = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{inner}}}" if inner else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
