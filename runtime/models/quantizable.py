"""Which layers of a model can keep quantized rows; a model without any is refused.

Attention and window layers can, where every head width is a multiple of 32. QSA layers pick rows out one by one, and
recurrent ones keep a state instead of rows: those stay as they are, and so do a drafter's own layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
from onecopy.runtime.errors import ModelLoadError
from onecopy.runtime.rows.layout import LayerLayout, Layout, RowTensor
from onecopy.runtime.rows.quantized import BITS, GROUPS, group_of, packed, quantized_layer

from .layouts import ModelRows

FLOATS = (mx.float32, mx.float16, mx.bfloat16)

_STAY = {
    "qsa": "qsa layers pick rows out one by one",
    "recurrent": "recurrent layers keep a state and no rows",
}


def quantized_rows(rows: ModelRows, bits: int, name: str) -> ModelRows:
    """`rows` with every layer that can in `bits` bits a value.

    ModelLoadError, in one line, when no layer can or `bits` is not offered.
    """
    if bits not in BITS:
        raise ModelLoadError(f"{name}: rows cannot be kept in {bits} bits; --kv-bits takes 8 or 4.")
    reasons = [why_not(layer, rows.dtypes) for layer in rows.layout.layers]
    if all(reasons):
        why = "; ".join(dict.fromkeys(reason for reason in reasons if reason))
        raise ModelLoadError(f"{name}: --kv-bits {bits}: no layer can keep quantized rows: {why}.")
    pairs = list(zip(rows.layout.layers, reasons, strict=True))
    changed = [layer for layer, reason in pairs if not reason]
    layers = tuple(layer if reason else quantized_layer(layer, bits) for layer, reason in pairs)
    return replace(rows, layout=Layout(layers), dtypes=rows.dtypes | dict(_types(changed, rows.dtypes, bits)))


def why_not(layer: LayerLayout, dtypes: dict[RowTensor, Any]) -> str | None:
    """Why a layer cannot keep quantized rows; None when it can."""
    if layer.kind in _STAY:
        return _STAY[layer.kind]
    for t in layer.rows:
        if group_of(t.width) is None:
            return f"{layer.kind} layers of a head width of {t.width}, which is no multiple of {min(GROUPS)}"
        if dtypes[t] not in FLOATS:
            return f"{layer.kind} layers whose rows are {dtypes[t]}"
    return None


def _types(layers: list[LayerLayout], dtypes: dict[RowTensor, Any], bits: int) -> Iterator[tuple[RowTensor, Any]]:
    for t in (t for layer in layers for t in layer.rows):
        ints, scales, biases = packed(t, bits)
        yield from ((ints, mx.uint8), (scales, dtypes[t]), (biases, dtypes[t]))
