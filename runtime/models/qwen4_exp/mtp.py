"""The multi-token-prediction head: guesses the token after next from the trunk's streams and the next token.

Wiring as publicly described for this family; a wrong wire would cost acceptance, never a token, because every
proposal is verified by the trunk. Its QSA layer keeps rows of its own: row p stands for (stream p, token p + 1). Of
several layers (`mtp_num_hidden_layers` in public engines' configs) each guess takes one, and all else is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .attention import Attention
from .cache import IndexedRows
from .config import Config
from .hyper import Connection, Mixer
from .layers import Norm, Span
from .moe import SparseMoe

if TYPE_CHECKING:
    from .model import Model, Tokens


class MtpLayer(nn.Module):
    """An indexed layer without PLE."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = SparseMoe(config)
        self.attn_hyper_connection = Connection(config)
        self.mlp_hyper_connection = Connection(config)

    def __call__(self, streams: mx.array, span: Span, rows: IndexedRows) -> mx.array:
        streams = self.attn_hyper_connection.around(streams, self.self_attn, span, rows)
        return self.mlp_hyper_connection.around(streams, self.mlp)


class MtpHead(nn.Module):
    """streams, next ids -> new streams; the trunk's `lm_head` reads them through the head's own mixer."""

    def __init__(self, config: Config, layers: int = 1) -> None:
        super().__init__()
        c = config
        self.pre_fc_norm_hidden = Norm(c.hc_count * c.hidden_size, c.eps)
        self.pre_fc_norm_embedding = Norm(c.hidden_size, c.eps)
        self.fc_hidden = nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        self.fc_embedding = nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        self.layers = [MtpLayer(c) for _ in range(layers)]
        self.hyper_connection_mixer = Mixer(c)
        self._c = config

    def __call__(self, streams: mx.array, embedded: mx.array, rows: IndexedRows, layer: int = 0) -> mx.array:
        """streams [B, W, n·d] at positions p, embeddings [B, W, d] of tokens p + 1 -> streams [B, W, n·d].

        Writes the rows of one layer.
        """
        per_stream = mx.unflatten(self.pre_fc_norm_hidden(streams), -1, (self._c.hc_count, -1))
        token = self.fc_embedding(self.pre_fc_norm_embedding(embedded))
        joined = (self.fc_hidden(per_stream) + token[..., None, :]).flatten(-2)
        span = Span(tuple(rows.starts), streams.shape[1], self._c)
        return self.layers[layer](joined, span, rows)


def mtp_logits(
    model: Model, streams: mx.array, next_ids: Tokens, rows: IndexedRows, layer: int = 0
) -> tuple[mx.array, mx.array]:
    """One step of a layer: logits [B, W, vocab] for tokens p + 2, and the streams the next depth starts from.

    streams [B, W, n·d] of positions p (the trunk's, or the last step's); next_ids [B, W] tokens at p + 1.
    Writes W rows of that layer from rows.starts on.
    """
    head: MtpHead = model.mtp
    embedded = model.embed_tokens(mx.array(np.array(next_ids, np.int64)))
    out = head(streams, embedded, rows, layer)
    return model.head(head.hyper_connection_mixer(out)), out


def propose(
    model: Model, streams: mx.array, tokens: Sequence[int], open_rows: Callable[[int], IndexedRows], depth: int
) -> list[list[int]]:
    """Greedy guesses for the `depth` tokens after `tokens`, per conversation: B lists of `depth` ids.

    streams [B, 1, n·d]: the trunk's at each conversation's last row p; tokens: the B tokens at p + 1, already picked.
    open_rows(i): the head's rows with every frontier moved on by i; depth i writes one row there, and whatever
    the trunk rejects is overwritten by the next call.
    """
    guesses: list[list[int]] = [[] for _ in tokens]
    step = [int(token) for token in tokens]
    for i in range(depth):
        logits, streams = mtp_logits(model, streams, [[token] for token in step], open_rows(i))
        step = np.array(mx.argmax(logits[:, -1], axis=-1)).tolist()
        for guess, token in zip(guesses, step, strict=True):
            guess.append(token)
    return guesses
