"""The gated residual (hyper-connections): n parallel residual streams, mixed before a block and fed after it."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from .config import Config
from .layers import Norm, silu, wide


class Mixer(nn.Module):
    """Reads one block input out of the n streams. Source: the public qwen4_exp reference."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        size = config.hc_count * config.hidden_size
        self.hc_norm = Norm(size, config.eps, config.hc_count)
        self.input_mix_weight_down = nn.Linear(size, config.hc_lowrank, bias=False)
        self.input_mix_weight_up = nn.Linear(config.hc_lowrank, size, bias=False)
        self._count = config.hc_count

    def __call__(self, streams: mx.array) -> mx.array:
        """streams [B, W, n·d] -> block input [B, W, d]."""
        return self._mix(self.hc_norm(streams))

    def _mix(self, normed: mx.array) -> mx.array:
        low = silu(self.input_mix_weight_down(normed) / self._count)
        gated = mx.sigmoid(wide(self.input_mix_weight_up(low))) * wide(normed)
        return mx.unflatten(gated, -1, (self._count, -1)).mean(axis=-2).astype(normed.dtype)


class Connection(Mixer):
    """A mixer that also says how strongly each stream takes the block's output."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.block_inject_weight = nn.Linear(config.hc_count * config.hidden_size, config.hc_count, bias=False)

    def around(self, streams: mx.array, block: nn.Module, *args: object) -> mx.array:
        """streams + inject ⊗ block(mixed, *args); streams [B, W, n·d] in and out."""
        normed = self.hc_norm(streams)
        inject = 2 * mx.sigmoid(self.block_inject_weight(normed) / self._count)
        out = block(self._mix(normed), *args)
        return streams + (inject[..., None] * out[..., None, :]).flatten(-2)
