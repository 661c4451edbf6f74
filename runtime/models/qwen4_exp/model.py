"""The text trunk: embedding, layers of delta net or QSA with mixture of experts, mixer, head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .attention import Attention
from .cache import IndexedRows, LayerRows, RecurrentRows, StateSpec
from .config import INDEXED, Config
from .delta import DeltaNet
from .hyper import Connection, Mixer
from .layers import Span
from .moe import SparseMoe
from .mtp import MtpHead
from .ngram import Ids, NgramHash
from .ple import Ple
from .table import NgramTable

if TYPE_CHECKING:
    from onecopy.runtime.models.layouts import ModelRows

Tokens = mx.array | Ids | Sequence[Sequence[int]]
Tables = Mapping[int, tuple[NgramHash, NgramTable]]


class Layer(nn.Module):
    """PLE (some layers), then attention, then experts, each around the n residual streams."""

    def __init__(self, config: Config, index: int, tables: Tables) -> None:
        super().__init__()
        if config.layer_types[index] == INDEXED:
            self.self_attn = Attention(config)
        else:
            self.linear_attn = DeltaNet(config)
        if index in tables:
            self.ple = Ple(config, *tables[index])
        self.mlp = SparseMoe(config)
        self.attn_hyper_connection = Connection(config)
        self.mlp_hyper_connection = Connection(config)

    def states(self) -> tuple[StateSpec, ...]:
        """The fixed-size arrays this layer keeps per conversation; () for an indexed layer."""
        if "self_attn" in self:
            return ()
        own: tuple[StateSpec, ...] = self.linear_attn.states()
        return own + (self.ple.states() if "ple" in self else ())

    def __call__(self, streams: mx.array, ids: Ids, span: Span, rows: LayerRows) -> mx.array:
        """streams [B, W, n·d] -> the same shape."""
        if "ple" in self:
            streams = streams + self.ple(streams, ids, cast(RecurrentRows, rows))
        if "self_attn" in self:
            streams = self.attn_hyper_connection.around(streams, self.self_attn, span, rows)
        else:
            streams = self.attn_hyper_connection.around(streams, self.linear_attn, rows)
        return self.mlp_hyper_connection.around(streams, self.mlp)


class Model(nn.Module):
    """qwen4_exp. `model(ids, rows)` gives logits; `streams` and `logits` are its two halves.

    rows: one `IndexedRows` or `RecurrentRows` per layer, for the B conversations of this forward; they are written.
    mtp: layers of the prediction head, 0 for none.
    """

    def __init__(self, config: Config, tables: Tables, *, mtp: int = 0) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [Layer(config, i, tables) for i in range(len(config.layer_types))]
        self.hyper_connection_mixer = Mixer(config)
        if not config.tied:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if mtp:
            self.mtp = MtpHead(config, mtp)
        self._c = config

    @property
    def config(self) -> Config:
        return self._c

    @property
    def kinds(self) -> tuple[str, ...]:
        """Each layer's kind of rows, in order: INDEXED or LINEAR."""
        return self._c.layer_types

    def states(self) -> list[tuple[StateSpec, ...]]:
        """Each layer's fixed-size states, in order."""
        return [layer.states() for layer in self.layers]

    def __call__(self, ids: Tokens, cache: Sequence[LayerRows]) -> mx.array:
        """Token ids [B, W] -> logits [B, W, vocab], f32 or the weights' dtype."""
        return self.logits(self.streams(ids, cache))

    def streams(self, ids: Tokens, rows: Sequence[LayerRows]) -> mx.array:
        """Token ids [B, W] -> the residual streams before the mixer [B, W, n·d]. Writes the new rows."""
        host = np.array(ids, np.int64)
        span = self._span(rows, host.shape[1])
        streams = mx.tile(self.embed_tokens(mx.array(host)), (1, 1, self._c.hc_count))
        for layer, kept in zip(self.layers, rows, strict=True):
            streams = layer(streams, host, span, kept)
        return streams

    def logits(self, streams: mx.array) -> mx.array:
        """Streams [B, W, n·d] -> logits [B, W, vocab]; pass only the rows whose logits are wanted."""
        return self.head(self.hyper_connection_mixer(streams))

    def head(self, x: mx.array) -> mx.array:
        """Mixed rows [B, W, d] -> logits."""
        return self.embed_tokens.as_linear(x) if self._c.tied else self.lm_head(x)

    def kept_rows(self) -> ModelRows:
        """What the model keeps per token and conversation, for whoever serves it. Runs the probe's tokens."""
        from .served import kept_rows

        return kept_rows(self)

    def _span(self, rows: Sequence[LayerRows], width: int) -> Span:
        indexed = (cast(IndexedRows, r).starts for r, kind in zip(rows, self.kinds, strict=True) if kind == INDEXED)
        return Span(tuple(next(indexed, ())), width, self._c)
