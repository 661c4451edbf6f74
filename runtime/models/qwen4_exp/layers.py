"""Small parts every qwen4_exp layer shares: norms, gates, causal taps, and rotary angles from absolute positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from .config import Config


def silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


GATES: dict[str, Callable[[mx.array], mx.array]] = {"silu": silu, "sigmoid": mx.sigmoid}


def wide(x: mx.array) -> mx.array:
    """x in f64 on a CPU, in f32 elsewhere: for cheap sums whose rounding the layers after them magnify.

    CPU f32 sums run strictly in order, and this model divides short vectors by their own size.
    """
    return x.astype(mx.float64 if mx.default_device().type == mx.DeviceType.cpu else mx.float32)


def rms(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """x / RMS(x) · weight over the last axis, f32; weight broadcasts."""
    x = wide(x)
    normed = x * mx.rsqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    return (normed * weight).astype(mx.float32)


class Norm(nn.Module):
    """RMS norm in f32 over the last axis, or over groups of it. `weight` holds the factor itself (1 + w)."""

    def __init__(self, size: int, eps: float, groups: int = 1) -> None:
        super().__init__()
        self.weight = mx.ones((size,))
        self._eps, self._groups = eps, groups

    def __call__(self, x: mx.array) -> mx.array:
        """x [..., size] -> the same shape and dtype."""
        grouped = (self._groups, x.shape[-1] // self._groups)
        normed = rms(mx.unflatten(x, -1, grouped), self.weight.reshape(grouped), self._eps)
        return normed.flatten(-2).astype(x.dtype)


class Taps(nn.Module):
    """A causal depthwise convolution as a sum of shifted rows, so a row's bits never depend on its neighbours."""

    def __init__(self, channels: int, kernel: int, dilation: int = 1) -> None:
        super().__init__()
        self.weight = mx.zeros((kernel, channels))
        self._dilation = dilation

    @property
    def keep(self) -> int:
        """Rows of history the first new row needs."""
        return (int(self.weight.shape[0]) - 1) * self._dilation

    def __call__(self, rows: mx.array) -> mx.array:
        """rows [B, keep + W, C], old rows first -> [B, W, C] in f32."""
        rows, width = wide(rows), rows.shape[1] - self.keep
        taps = range(self.weight.shape[0])
        parts = [rows[:, j * self._dilation : j * self._dilation + width] * self.weight[j] for j in taps]
        return total(parts).astype(mx.float32)


@dataclass(frozen=True)
class Span:
    """The positions one forward covers: conversation b's new rows are starts[b] … starts[b] + width - 1."""

    starts: tuple[int, ...]
    width: int
    config: Config

    @cached_property
    def angles(self) -> tuple[mx.array, mx.array]:
        """cos and sin of the new rows, [B, W, rotary_dim / 2]."""
        return angles(self.config, np.array(self.starts)[:, None] + np.arange(self.width))


def angles(config: Config, positions: NDArray[np.int64]) -> tuple[mx.array, mx.array]:
    """cos and sin [*positions.shape, rotary_dim / 2]. Frequencies and phases are f32 as published; the functions are
    taken in f64, so a position's angle is the same however many positions are computed beside it."""
    half = np.arange(0, config.rotary_dim, 2, dtype=np.float32) / np.float32(config.rotary_dim)
    frequency = np.float32(1.0) / np.power(np.float32(config.rope_theta), half)
    phase = (positions[..., None].astype(np.float32) * frequency).astype(np.float64)
    return mx.array(np.cos(phase).astype(np.float32)), mx.array(np.sin(phase).astype(np.float32))


def rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """NeoX rotation of the first 2 · cos.shape[-1] values of x's last axis; cos and sin broadcast to the rest."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return mx.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1).astype(x.dtype)


def total(parts: Sequence[mx.array]) -> mx.array:
    """Their sum, strictly in order: trailing zero parts change no bit."""
    first, *others = parts
    for part in others:
        first = first + part
    return first
