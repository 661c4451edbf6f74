"""The prediction head of qwen4_exp, which reads the residual streams behind the last layer and keeps indexed rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from onecopy.runtime.models.loaded import Loaded
from onecopy.runtime.rows.layout import LayerLayout, RowTensor

from .taps import Taps

Array = Any

MODULE = "onecopy.runtime.models.qwen4_exp.model"
"""Where the class of such a model lives."""


class Qwen4Head:
    """The head that a model was loaded with, as `model.mtp`."""

    def __init__(self, loaded: Loaded) -> None:
        self._model = loaded.model
        rows = loaded.model.kept_rows()
        self.layer: LayerLayout = next(layer for layer in rows.layout.layers if layer.kind == "qsa")
        kept = (*self.layer.rows, *self.layer.pooled)
        self.dtypes: Mapping[RowTensor, Any] = {tensor: rows.dtypes[tensor] for tensor in kept}
        self._taps = Taps([loaded.model.layers[-1]])

    def features(self) -> Array:
        return self._taps.take()[0]

    def step(self, features: Array, ids: Sequence[Sequence[int]], cache: Any) -> Array:
        embedded = self._model.embed_tokens(mx.array([list(row) for row in ids], mx.int32))
        return self._model.mtp(features, embedded, cache)

    def logits(self, features: Array) -> Array:
        out = self._model.head(self._model.mtp.hyper_connection_mixer(features[None]))
        return out.reshape(-1, out.shape[-1])
