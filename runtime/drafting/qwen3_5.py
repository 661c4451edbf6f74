"""The prediction head of Qwen3.5 checkpoints: norms, a projection of both inputs, decoder layers, the shared output.

As published for Qwen3-Next and its successors (the public serving engines agree on the wiring): the embedding of the
next token and the model's final hidden state, each through a norm of its own, are joined embedding first and projected
to one width; a decoder layer with full attention and a last norm follow; embedding and output head are the model's. Of
several layers (`mtp_num_hidden_layers`) each guess takes one, and all else is shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from onecopy.runtime.errors import ModelLoadError
from onecopy.runtime.models.loaded import Loaded
from onecopy.runtime.rows.layout import LayerLayout, RowTensor

from .rows import OUTPUT, Cache
from .taps import Taps

Array = Any

KINDS = frozenset({"mlx_lm.models.qwen3_5", "mlx_lm.models.qwen3_5_moe"})
"""Modules of the model classes whose checkpoints carry this head."""


class Mtp(nn.Module):  # type: ignore[misc]
    """The head's own weights, by the names they have in a checkpoint."""

    def __init__(self, args: Any, layers: int = 1) -> None:
        from mlx_lm.models.qwen3_5 import DecoderLayer

        super().__init__()
        width, eps = args.hidden_size, args.rms_norm_eps
        self.pre_fc_norm_embedding = nn.RMSNorm(width, eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(width, eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = [DecoderLayer(args, args.full_attention_interval - 1) for _ in range(layers)]
        self.norm = nn.RMSNorm(width, eps)

    def __call__(self, hidden: Array, embedded: Array, cache: Cache, layer: int = 0) -> Array:
        """hidden, embedded `[batch, length, width]` to the same shape. Writes the rows of one layer."""
        joined = mx.concatenate([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], axis=-1)
        return self.norm(self.layers[layer](self.fc(joined), mask=None, cache=cache))


class Qwen35Head:
    """The head beside its model. Built before the model is prepared: its modules are exchanged with the model's."""

    def __init__(self, loaded: Loaded) -> None:
        self._text = loaded.model.language_model
        self._taps = Taps([self._text.model])
        args = self._text.args
        dtype = self._text.model.norm.weight.dtype
        self.depth = layers_of(loaded)
        loaded.model.mtp = Mtp(args, self.depth)
        _fill(loaded.model.mtp, _plain(loaded), dtype, loaded.id)
        self._model = loaded.model
        kept = RowTensor("kv", 2 * args.num_key_value_heads, args.head_dim, dtype.size)
        self.layer = LayerLayout("attention", (kept,))
        self.output = RowTensor(OUTPUT, 1, args.hidden_size, dtype.size)
        self.dtypes: Mapping[RowTensor, Any] = {kept: dtype, self.output: dtype}

    def features(self) -> Array:
        return self._taps.take()[0]

    def step(self, layer: int, features: Array, ids: Sequence[Sequence[int]], cache: Cache) -> Array:
        embedded = self._text.model.embed_tokens(mx.array([list(row) for row in ids], mx.int32))
        return self._model.mtp(features, embedded, cache, layer)

    def logits(self, features: Array) -> Array:
        tied = self._text.args.tie_word_embeddings
        head = self._text.model.embed_tokens.as_linear if tied else self._text.lm_head
        out = head(features[None])
        return out.reshape(-1, out.shape[-1])


def layers_of(loaded: Loaded) -> int:
    """Layers of the head that a checkpoint brings along, whatever its config says; 0 where it has none."""
    return len({name.split(".")[1] for name in loaded.draft_head if name.startswith("layers.")})


def _plain(loaded: Loaded) -> dict[str, Array]:
    """The head's tensors by the module names that mlx-lm gives such layers, packed ones multiplied out."""
    packed = loaded.quantization or {}
    out: dict[str, Array] = {}
    for name, tensor in loaded.draft_head.items():
        stem, _, part = name.rpartition(".")
        if part in ("scales", "biases") and f"{stem}.scales" in loaded.draft_head:
            continue
        if f"{stem}.scales" in loaded.draft_head:
            scales, biases = loaded.draft_head[f"{stem}.scales"], loaded.draft_head.get(f"{stem}.biases")
            tensor = mx.dequantize(tensor, scales, biases, packed.get("group_size", 64), packed.get("bits", 4))
        out.update(_named(name, tensor))
    return _stacked(out)


def _named(name: str, tensor: Array) -> dict[str, Array]:
    """Experts that are stored together, gate above up, as the two that mlx-lm's layer has."""
    if name.endswith("experts.gate_up_proj"):
        stem = name.replace("experts.gate_up_proj", "switch_mlp")
        gate, up = mx.split(tensor, 2, axis=-2)
        return {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
    if name.endswith("experts.down_proj"):
        return {name.replace("experts.down_proj", "switch_mlp.down_proj.weight"): tensor}
    return {name: tensor}


def _stacked(tensors: dict[str, Array]) -> dict[str, Array]:
    """Experts that are stored one by one, joined."""
    out, experts = {}, dict[str, dict[int, Array]]()
    for name, tensor in tensors.items():
        stem, found, rest = name.partition(".experts.")
        number, _, part = rest.partition(".")
        if found and number.isdigit():
            experts.setdefault(f"{stem}.switch_mlp.{part}", {})[int(number)] = tensor
        else:
            out[name] = tensor
    return out | {name: mx.stack([parts[i] for i in sorted(parts)]) for name, parts in experts.items()}


def _fill(module: Mtp, tensors: dict[str, Array], dtype: Any, name: str) -> None:
    """ModelLoadError names the first tensor that is missing, left over, or of another shape."""
    wanted = {key: tuple(value.shape) for key, value in tree_flatten(module.parameters())}
    wrong = sorted(wanted.keys() ^ tensors.keys()) or sorted(k for k in wanted if wanted[k] != tuple(tensors[k].shape))
    if wrong:
        raise ModelLoadError(f"{name}: its prediction head does not fit the model: mtp.{wrong[0]}.")
    module.load_weights([(key, tensor.astype(dtype)) for key, tensor in tensors.items()])
    module.eval()
    mx.eval(module.parameters())
