"""Per-layer embeddings: hashed n-gram rows, gated by each residual stream, added before the layer.

The rows come from the memory-mapped table on the host, before the layer's graph is built.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .cache import RecurrentRows, StateSpec, Window
from .config import Config
from .layers import Norm, Taps, silu
from .ngram import Ids, NgramHash
from .table import NgramTable


class Ple(nn.Module):
    """One PLE module. States: "ple_conv" (normed rows the dilated taps look back at) and "ngram" (last ids)."""

    def __init__(self, config: Config, ngram_hash: NgramHash, table: NgramTable) -> None:
        super().__init__()
        c, size = config, config.hc_count * config.hidden_size
        self.key_proj = nn.Linear(c.ple_dim, size, bias=False)
        self.value_proj = nn.Linear(c.ple_dim, c.hidden_size, bias=False)
        self.norm_key = Norm(size, c.eps, c.hc_count)
        self.norm_query = Norm(size, c.eps, c.hc_count)
        self.norm_conv = Norm(size, c.eps, c.hc_count)
        self.conv1d = Taps(size, c.ple_kernel, c.ngram_size)
        self._c, self._hash, self._table = config, ngram_hash, table

    def states(self) -> tuple[StateSpec, ...]:
        c = self._c
        return (
            StateSpec("ple_conv", (self.conv1d.keep, c.hc_count * c.hidden_size), mx.float32),
            StateSpec("ngram", (self._hash.context,), mx.int32, fill=c.eos),
        )

    def __call__(self, streams: mx.array, ids: Ids, rows: RecurrentRows) -> mx.array:
        """What to add to streams [B, W, n·d], for host token ids [B, W]. Puts both states."""
        embedded = self._embed(ids, rows).astype(streams.dtype)
        gated = self._gated(streams, embedded)
        history = mx.concatenate([rows.get("ple_conv"), self.norm_conv(gated).astype(mx.float32)], axis=1)
        rows.put("ple_conv", Window(history, self.conv1d.keep))
        return gated + silu(self.conv1d(history)).astype(gated.dtype)

    def _embed(self, ids: Ids, rows: RecurrentRows) -> mx.array:
        """The n-gram rows of each token, heads side by side: [B, W, ple_dim]. Reads the ids' state on the host."""
        history = np.concatenate([np.array(rows.get("ngram"), np.int64), ids], axis=1)
        rows.put("ngram", Window(mx.array(history.astype(np.int32)), self._hash.context))
        return mx.array(self._table.take(self._hash(history)).reshape(*ids.shape, -1))

    def _gated(self, streams: mx.array, embedded: mx.array) -> mx.array:
        """sigmoid(signed root of key · query) · value, per stream: [B, W, n·d]."""
        n, d = self._c.hc_count, self._c.hidden_size
        match = self.norm_key(self.key_proj(embedded)) * self.norm_query(streams)
        score = mx.unflatten(match, -1, (n, d)).sum(axis=-1, keepdims=True) / d**0.5
        score = mx.sign(score) * mx.sqrt(mx.maximum(mx.abs(score), 1e-6))
        return (mx.sigmoid(score) * self.value_proj(embedded)[..., None, :]).flatten(-2)
