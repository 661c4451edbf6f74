"""The prediction head of qwen4_exp, which reads the residual streams behind the last layer and keeps indexed rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from onecopy.runtime.models.loaded import Loaded
from onecopy.runtime.rows.indexed import RAW
from onecopy.runtime.rows.layout import LayerLayout, RowTensor

from .rows import OUTPUT
from .taps import Taps

Array = Any

MODULE = "onecopy.runtime.models.qwen4_exp.model"
"""Where the class of such a model lives."""


class Qwen4Head:
    """The head that a model was loaded with, as `model.mtp`."""

    def __init__(self, loaded: Loaded) -> None:
        self._model, c = loaded.model, loaded.model.config
        rows = loaded.model.kept_rows()
        self.depth = len(loaded.model.mtp.layers)
        self.layer: LayerLayout = next(layer for layer in rows.layout.layers if layer.kind == "qsa")
        kept = {tensor: rows.dtypes[tensor] for tensor in (*self.layer.rows, *self.layer.pooled)}
        # Raw index keys have the type of the streams that they are projected from.
        dtype = next(d for tensor, d in kept.items() if tensor.name == RAW)
        self.output = RowTensor(OUTPUT, 1, c.hc_count * c.hidden_size, dtype.size)
        self.dtypes: Mapping[RowTensor, Any] = kept | {self.output: dtype}
        self._taps = Taps([loaded.model.layers[-1]])

    def features(self) -> Array:
        return self._taps.take()[0]

    def step(self, layer: int, features: Array, ids: Sequence[Sequence[int]], cache: Any) -> Array:
        embedded = self._model.embed_tokens(mx.array([list(row) for row in ids], mx.int32))
        return self._model.mtp(features, embedded, cache, layer)

    def logits(self, features: Array) -> Array:
        out = self._model.head(self._model.mtp.hyper_connection_mixer(features[None]))
        return out.reshape(-1, out.shape[-1])
