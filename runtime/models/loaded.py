"""What loading a model yields, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.nn as nn
from onecopy.runtime.text.tokenizer import Tokenizer

Kind = Literal["hf", "gguf"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run: weights evaluated, in evaluation mode, owned by the thread that loaded it.

    id: the name clients use. config: in mlx-lm's words, whatever the source. eos: ids that end a reply.
    digest: hex, over the weights' bytes and the config. quantization: how the source stores its weights, None when
    they are plain floats. dtype: what they became here ("native" keeps the source's). context: tokens the model was
    made for. path: the directory or file. draft_head: tensors of a head that mlx-lm's model code leaves out, by name.
    """

    id: str
    model: nn.Module
    config: dict[str, Any]
    tokenizer: Tokenizer | None
    template: str | None
    eos: frozenset[int]
    digest: str
    kind: Kind
    quantization: dict[str, Any] | None
    dtype: str
    context: int
    path: Path
    draft_head: Mapping[str, Any] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """Token ids the model knows, also where a config keeps them for its text part. 0 when it does not say."""
        return int(self.config.get("vocab_size") or (self.config.get("text_config") or {}).get("vocab_size") or 0)

    @property
    def text(self) -> str:
        """What kinds of prompts the model takes, in words."""
        if self.tokenizer is None:
            return "none: prompts are token ids on /v1/completions, and so are replies"
        return "prompts" if self.template is None else "prompts and chats"

    @property
    def stored(self) -> str:
        """How the source stores its weights, in words."""
        found = self.quantization or {}
        bits, group = found.get("bits"), found.get("group_size")
        if bits and group:
            return f"{bits} bits in groups of {group}"
        return ", ".join(found.get("types", ("packed",))) if found else "plain floats"
