"""qwen4_exp in NumPy and float64, one whole sequence at a time and without any cache.

Written from the family's description, sharing nothing with the model under test: loops instead of tiles, masks
instead of gathers, Python integers instead of wrapping ones. Slow, and meant to be read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.qwen4_tiny import Weights, primes_from

F = NDArray[np.float64]

M64 = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


class Reference:
    """`logits(ids)` for one sequence; `selected[layer]` then holds that layer's bool mask [T, T].

    best: indices of the k largest of some scores; which of equal ones it takes is the published routine's business.
    """

    def __init__(self, config: dict[str, Any], weights: Weights, best: Callable[[list[float], int], list[int]]) -> None:
        self.c, self.best = config, best
        self.w = {n.removeprefix("model."): v.astype(np.float64) for n, v in weights.items()}
        self.selected: dict[int, NDArray[np.bool_]] = {}

    def logits(self, ids: list[int]) -> F:
        return self.mix("hyper_connection_mixer.", self.streams(ids))[0] @ self.head().T

    def streams(self, ids: list[int]) -> F:
        """The residual streams [T, n·d] before the final mixer."""
        streams = np.tile(self.w["embed_tokens.weight"][ids], (1, self.c["hc_count"]))
        for i, kind in enumerate(self.c["layer_types"]):
            stem = f"layers.{i}."
            if i + 1 in self.c["ple_layer_ids"]:
                streams = streams + self.ple(stem + "ple.", streams, ids, sorted(self.c["ple_layer_ids"]).index(i + 1))
            streams = self.layer(stem, streams, kind == "linear_attention", i)
        return streams

    def mtp_logits(self, streams: F, next_ids: list[int]) -> F:
        normed = rms(streams, self.c["rms_norm_eps"]) * (1 + self.w["mtp.pre_fc_norm_hidden.weight"])
        embedded = rms(self.w["embed_tokens.weight"][next_ids], self.c["rms_norm_eps"])
        token = embedded * (1 + self.w["mtp.pre_fc_norm_embedding.weight"]) @ self.w["mtp.fc_embedding.weight"].T
        parts = np.split(normed, self.c["hc_count"], axis=-1)
        joined = np.concatenate([p @ self.w["mtp.fc_hidden.weight"].T + token for p in parts], axis=-1)
        out = self.layer("mtp.layers.0.", joined, False, -1)
        return self.mix("mtp.hyper_connection_mixer.", out)[0] @ self.head().T

    def head(self) -> F:
        return self.w.get("lm_head.weight", self.w["embed_tokens.weight"])

    def layer(self, stem: str, streams: F, linear: bool, index: int) -> F:
        x, inject = self.mix(stem + "attn_hyper_connection.", streams)
        y = self.delta(stem + "linear_attn.", x) if linear else self.attention(stem + "self_attn.", x, index)
        streams = streams + np.concatenate([inject[:, [i]] * y for i in range(self.c["hc_count"])], axis=1)
        x, inject = self.mix(stem + "mlp_hyper_connection.", streams)
        y = self.moe(stem + "mlp.", x)
        return streams + np.concatenate([inject[:, [i]] * y for i in range(self.c["hc_count"])], axis=1)

    def grouped(self, name: str, x: F) -> F:
        parts = np.split(x, self.c["hc_count"], axis=-1)
        return np.concatenate([rms(p, self.c["rms_norm_eps"]) for p in parts], axis=-1) * (1 + self.w[name])

    def mix(self, stem: str, streams: F) -> tuple[F, F]:
        n = self.c["hc_count"]
        h = self.grouped(stem + "hc_norm.weight", streams)
        low = silu(h @ self.w[stem + "input_mix_weight_down.weight"].T / n)
        m = sigmoid(low @ self.w[stem + "input_mix_weight_up.weight"].T)
        x = sum(np.split(m * h, n, axis=-1)) / n
        inject = self.w.get(stem + "block_inject_weight.weight")
        return x, np.empty(0) if inject is None else 2 * sigmoid(h @ inject.T / n)

    def norm(self, name: str, x: F) -> F:
        return rms(x, self.c["rms_norm_eps"]) * (1 + self.w[name])

    def linear(self, stem: str, x: F) -> F:
        return x @ self.w[stem + ".weight"].T + self.w.get(stem + ".bias", np.zeros(1))

    def attention(self, stem: str, x: F, index: int) -> F:
        c, steps = self.c, len(x)
        heads, kv, dh = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        both = self.linear(stem + "q_proj", x).reshape(steps, heads, 2, dh)
        q = self.turn(self.norm(stem + "q_norm.weight", both[:, :, 0]), np.arange(steps))
        keys = self.linear(stem + "k_proj", x).reshape(steps, kv, dh)
        k = self.turn(self.norm(stem + "k_norm.weight", keys), np.arange(steps))
        v = self.linear(stem + "v_proj", x).reshape(steps, kv, dh)
        mask = self.select(stem + "indexer.", x)
        self.selected[index] = mask
        out = np.zeros((steps, heads, dh))
        for h in range(heads):
            of = h // (heads // kv)
            scores = np.where(mask, q[:, h] @ k[:, of].T / math.sqrt(dh), -np.inf)
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, h] = p / p.sum(axis=1, keepdims=True) @ v[:, of]
        gated = out.reshape(steps, -1) * sigmoid(both[:, :, 1].reshape(steps, -1))
        return self.linear(stem + "o_proj", gated)

    def select(self, stem: str, x: F) -> NDArray[np.bool_]:
        c, steps = self.c, len(x)
        r, di, heads = c["indexer_compress_ratio"], c["indexer_head_dim"], c["indexer_n_heads"]
        projected = self.linear(stem + "index_qk_proj", x)
        q = self.norm(stem + "q_layernorm.weight", projected[:, : heads * di].reshape(steps, heads, di))
        q, raw = self.turn(q, np.arange(steps)), projected[:, heads * di :]
        pooled = np.array([raw[b * r : (b + 1) * r].mean(axis=0) for b in range(steps // r)]).reshape(-1, 1, di)
        pooled = self.turn(self.norm(stem + "k_layernorm.weight", pooled), np.arange(len(pooled)) * r)[:, 0]
        mask = np.zeros((steps, steps), bool)
        for t in range(steps):
            blocks = (t + 1) // r
            scores = np.maximum(q[t] @ pooled[:blocks].T, 0).sum(axis=0) / math.sqrt(di)
            for b in self.best(scores.tolist(), min(c["indexer_budget"] // r, blocks)):
                mask[t, b * r : (b + 1) * r] = True
            mask[t, blocks * r : t + 1] = True
        return mask

    def turn(self, x: F, positions: NDArray[np.int64]) -> F:
        """x [T, heads, D], the first rotary values of each head rotated in halves."""
        rope = self.c["rope_parameters"]
        size = int(self.c["head_dim"] * rope["partial_rotary_factor"])
        phase = positions[:, None] * rope["rope_theta"] ** (-np.arange(0, size, 2) / size)
        cos, sin = np.cos(phase)[:, None], np.sin(phase)[:, None]
        a, b = x[..., : size // 2], x[..., size // 2 : size]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., size:]], axis=-1)

    def delta(self, stem: str, x: F) -> F:
        c, steps = self.c, len(x)
        hk, hv, dk, dv = (
            c[f"linear_{n}"] for n in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        )
        taps = self.w[stem + "conv1d.weight"][:, 0]
        mixed = silu(causal(self.linear(stem + "in_proj_qkv", x), taps, 1))
        q, k, v = np.split(mixed, [hk * dk, 2 * hk * dk], axis=1)
        q, k = (np.repeat(unit(s.reshape(steps, hk, dk)), hv // hk, axis=1) for s in (q, k))
        q, v = q / math.sqrt(dk), v.reshape(steps, hv, dv)
        beta = sigmoid(self.linear(stem + "in_proj_b", x))
        g = -np.exp(self.w[stem + "A_log"]) * np.log1p(
            np.exp(self.linear(stem + "in_proj_a", x) + self.w[stem + "dt_bias"])
        )
        state, out = np.zeros((hv, dk, dv)), np.zeros((steps, hv, dv))
        for t in range(steps):
            for h in range(hv):
                s = state[h] * np.exp(g[t, h])
                s = s + np.outer(k[t, h], (v[t, h] - s.T @ k[t, h]) * beta[t, h])
                state[h], out[t, h] = s, s.T @ q[t, h]
        act = sigmoid if (c["output_gate_type"] or c["hidden_act"]) == "sigmoid" else silu
        z = self.linear(stem + "in_proj_z", x).reshape(steps, hv, dv)
        gated = rms(out, c["rms_norm_eps"]) * self.w[stem + "norm.weight"] * act(z)
        return self.linear(stem + "out_proj", gated.reshape(steps, -1))

    def moe(self, stem: str, x: F) -> F:
        c = self.c
        routed = self.linear(stem + "gate", x)
        p = np.exp(routed - routed.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        out = np.zeros_like(x)
        for t, row in enumerate(x):
            best = np.argsort(-p[t])[: c["num_experts_per_tok"]]
            scale = p[t, best].sum() if c["norm_topk_prob"] else 1.0
            for e in best:
                gate, up = np.split(self.w[stem + "experts.gate_up_proj"][e] @ row, 2)
                out[t] += p[t, e] / scale * (self.w[stem + "experts.down_proj"][e] @ (silu(gate) * up))
        inner = silu(self.linear(stem + "shared_expert.gate_proj", x)) * self.linear(stem + "shared_expert.up_proj", x)
        shared = self.linear(stem + "shared_expert.down_proj", inner)
        return out + sigmoid(self.linear(stem + "shared_expert_gate", x)) * shared

    def ple(self, stem: str, streams: F, ids: list[int], index: int) -> F:
        c, n = self.c, self.c["hc_count"]
        table = self.w[stem + "ple_embedding.ngram_embedding.weight"]
        embedded = np.array([table[self.ngram_rows(ids, t, index)].reshape(-1) for t in range(len(ids))])
        keys = self.grouped(stem + "norm_key.weight", embedded @ self.w[stem + "key_proj.weight"].T)
        queries = self.grouped(stem + "norm_query.weight", streams)
        value = embedded @ self.w[stem + "value_proj.weight"].T
        gates = [
            p.sum(axis=1, keepdims=True) / math.sqrt(c["hidden_size"]) for p in np.split(keys * queries, n, axis=1)
        ]
        gates = [np.sign(s) * np.sqrt(np.maximum(np.abs(s), 1e-6)) for s in gates]
        u = np.concatenate([sigmoid(s) * value for s in gates], axis=1)
        normed = self.grouped(stem + "norm_conv.weight", u)
        return u + silu(causal(normed, self.w[stem + "conv1d.weight"][:, 0], c["ngram_size"]))

    def ngram_rows(self, ids: list[int], t: int, index: int) -> list[int]:
        """The table rows of token t, n = 2 first."""
        c = self.c
        eos = c["eos_token_id"][0] if isinstance(c["eos_token_id"], list) else c["eos_token_id"]
        size, heads = c["ngram_size"], c["heads_per_ngram"]
        last = max((i for i in range(t) if ids[i] == eos), default=-1)
        token = [ids[t]] + [ids[t - p] if t - p > last else eos for p in range(1, size)]
        per_layer = (size - 1) * heads
        primes = primes_from(c["ngram_vocab_size_base"], per_layer * (index + 1))[-per_layer:]
        rows, mix, multipliers = (
            [],
            token[0] * self.multiplier(0, index),
            [self.multiplier(p, index) for p in range(size)],
        )
        for p in range(1, size):
            mix = signed(mix) ^ signed(token[p] * multipliers[p])
            for head in range(heads):
                i = (p - 1) * heads + head
                rows.append(mix % primes[i] + sum(primes[:i]))
        return rows

    def multiplier(self, p: int, index: int) -> int:
        z = (self.c["seed"] + 10007 * index + GAMMA * (p + 1) + GAMMA) & M64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
        half = max(1, ((2**63 - 1) // self.c["vocab_size"]) // 2)
        return int(2 * ((z ^ (z >> 31)) % half) + 1)


def signed(value: int) -> int:
    """`value` as a wrapped 64-bit signed integer."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def rms(x: F, eps: float) -> F:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)


def unit(x: F) -> F:
    return x / np.sqrt((x**2).sum(axis=-1, keepdims=True) + 1e-6)


def sigmoid(x: F) -> F:
    return 1 / (1 + np.exp(-x))


def silu(x: F) -> F:
    return x * sigmoid(x)


def causal(x: F, taps: F, dilation: int) -> F:
    """Depthwise causal convolution of x [T, C] with taps [C, k]."""
    out, last = np.zeros_like(x), taps.shape[1] - 1
    for t in range(len(x)):
        for j in range(taps.shape[1]):
            back = t - (last - j) * dilation
            out[t] += taps[:, j] * x[back] if back >= 0 else 0
    return out
