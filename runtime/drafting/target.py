"""The parts of a target model that a drafter beside it shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from onecopy.runtime.errors import Unsupported
from onecopy.runtime.models.loaded import Loaded

Array = Any


class Target:
    """Layers, embedding and output head of a model built as mlx-lm builds them. Unsupported where it is not."""

    def __init__(self, loaded: Loaded) -> None:
        self._text = getattr(loaded.model, "language_model", loaded.model)
        inner = getattr(self._text, "model", None)
        if not isinstance(inner, nn.Module) or "embed_tokens" not in inner or "layers" not in inner:
            raise Unsupported(f"{loaded.id}: this architecture has no place where a drafter could listen.")
        self._inner = inner

    @property
    def layers(self) -> list[nn.Module]:
        return list(self._inner.layers)

    @property
    def width(self) -> int:
        """Elements of a hidden state."""
        return int(self.embed([[0]]).shape[-1])

    @property
    def vocab(self) -> int:
        return int(self.logits(self.embed([[0]])[0]).shape[-1])

    @property
    def dtype(self) -> Any:
        """Of hidden states."""
        norms = (p for name, p in tree_flatten(self._inner.parameters()) if "norm" in name)
        return next(norms, mx.zeros(1)).dtype

    def embed(self, ids: Sequence[Sequence[int]]) -> Array:
        """Token ids `[batch, length]` to `[batch, length, width]`."""
        return self._inner.embed_tokens(mx.array([list(row) for row in ids], mx.int32))

    def logits(self, hidden: Array) -> Array:
        """`[n, width]` to `[n, vocab]`."""
        head = self._text.lm_head if "lm_head" in self._text else self._inner.embed_tokens.as_linear
        out = head(hidden[None])
        return out.reshape(-1, out.shape[-1])
