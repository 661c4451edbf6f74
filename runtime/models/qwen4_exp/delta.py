"""Gated delta net: linear attention whose whole past is one [Dk, Dv] matrix per head.

The recurrence runs one row at a time in every mode, so a row's bits are the same in prefill, decode and verify.
Source: Gated Delta Networks (Yang et al., 2024) as the public qwen4_exp reference uses it.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from .cache import RecurrentRows, StateSpec, Steps, Window
from .config import Config
from .layers import GATES, Taps, rms, silu


class DeltaNet(nn.Module):
    """One linear-attention layer. States: "conv" (last kernel - 1 rows) and "delta" ([Hv, Dk, Dv], f32)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        c, values = config, config.linear_value_heads * config.linear_value_dim
        self.in_proj_qkv = nn.Linear(c.hidden_size, c.conv_size, bias=False)
        self.in_proj_z = nn.Linear(c.hidden_size, values, bias=False)
        self.in_proj_b = nn.Linear(c.hidden_size, c.linear_value_heads, bias=False)
        self.in_proj_a = nn.Linear(c.hidden_size, c.linear_value_heads, bias=False)
        self.conv1d = Taps(c.conv_size, c.linear_kernel)
        self.A_log = mx.zeros((c.linear_value_heads,))
        self.dt_bias = mx.zeros((c.linear_value_heads,))
        self.norm = GatedNorm(c)
        self.out_proj = nn.Linear(values, c.hidden_size, bias=False)
        self._c = config

    def states(self) -> tuple[StateSpec, ...]:
        c = self._c
        delta = (c.linear_value_heads, c.linear_key_dim, c.linear_value_dim)
        return (
            StateSpec("conv", (c.linear_kernel - 1, c.conv_size), mx.float32),
            StateSpec("delta", delta, mx.float32),
        )

    def __call__(self, x: mx.array, rows: RecurrentRows) -> mx.array:
        """x [B, W, d] -> [B, W, d]. Puts both states."""
        q, k, v = self._qkv(x, rows)
        beta = mx.sigmoid(self.in_proj_b(x).astype(mx.float32))
        decay = mx.exp(-mx.exp(self.A_log) * _softplus(self.in_proj_a(x).astype(mx.float32) + self.dt_bias))
        out, steps = _recur(rows.get("delta"), (q, k, v, beta, decay), rows.trail)
        rows.put("delta", steps)
        z = mx.unflatten(self.in_proj_z(x), -1, (self._c.linear_value_heads, -1))
        return self.out_proj(self.norm(out, z).flatten(-2).astype(x.dtype))

    def _qkv(self, x: mx.array, rows: RecurrentRows) -> tuple[mx.array, mx.array, mx.array]:
        """Convolved queries, keys [B, W, Hv, Dk] and values [B, W, Hv, Dv] in f32. Puts "conv"."""
        c, keys = self._c, self._c.linear_key_heads * self._c.linear_key_dim
        history = mx.concatenate([rows.get("conv"), self.in_proj_qkv(x).astype(mx.float32)], axis=1)
        rows.put("conv", Window(history, self.conv1d.keep))
        q, k, v = mx.split(silu(self.conv1d(history)), [keys, 2 * keys], axis=-1)
        times = c.linear_value_heads // c.linear_key_heads
        q, k = (mx.repeat(_unit(mx.unflatten(s, -1, (c.linear_key_heads, -1))), times, axis=2) for s in (q, k))
        return q / c.linear_key_dim**0.5, k, mx.unflatten(v, -1, (c.linear_value_heads, -1))


class GatedNorm(nn.Module):
    """RMS(o) · w · act(z) per head; here w is the factor itself in the checkpoint too."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = mx.ones((config.linear_value_dim,))
        self._eps, self._act = config.eps, GATES[config.output_gate]

    def __call__(self, out: mx.array, z: mx.array) -> mx.array:
        """out, z [B, W, Hv, Dv] -> the same shape, f32."""
        return rms(out, self.weight, self._eps) * self._act(z.astype(mx.float32))


def _recur(state: mx.array, rows: tuple[mx.array, ...], trail: bool) -> tuple[mx.array, Steps]:
    """The delta rule over W rows. state [B, Hv, Dk, Dv]; out [B, W, Hv, Dv]; steps: every row's state, or the last."""
    width, outs, states = rows[0].shape[1], [], {0: state}
    for n in range(width):
        q, k, v, beta, decay = (part[:, n] for part in rows)
        state = state * decay[..., None, None]
        delta = (v[..., None, :] - k[..., None, :] @ state) * beta[..., None, None]
        state = state + k[..., None] * delta
        outs.append(q[..., None, :] @ state)
        states[n + 1] = state
    kept = states if trail else {width: state}
    return mx.concatenate(outs, axis=2).swapaxes(1, 2), Steps(kept)


def _unit(x: mx.array) -> mx.array:
    return x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


def _softplus(x: mx.array) -> mx.array:
    return mx.logaddexp(x, mx.array(0.0))
