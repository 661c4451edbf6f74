"""A tokenizer from a Hugging Face directory: tokenizer.json, or what transformers can convert to it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from onecopy.runtime.errors import ModelLoadError
from onecopy.runtime.text.tokenizer import Tokenizer
from tokenizers import Tokenizer as Inner

from .safetensors import parse

OLDER_FILES = ("tokenizer.model", "vocab.json", "tiktoken.model")
NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def tokenizer_of(path: Path, ends: Iterable[int]) -> Tokenizer | None:
    """The tokenizer in directory `path`, None when it holds none. ends: end ids the model's config names."""
    inner = _inner(path)
    if inner is None:
        return None
    settings = _json(path / "tokenizer_config.json")
    names = {name: _content(settings[name]) for name in NAMES if settings.get(name)}
    eos = inner.token_to_id(names.get("eos_token", ""))
    return Tokenizer(
        inner,
        eos_ids={*ends, *([] if eos is None else [eos])},
        bos_id=inner.token_to_id(names.get("bos_token", "")),
        template=_template(path, settings),
        names=names,
    )


def _inner(path: Path) -> Inner | None:
    file = path / "tokenizer.json"
    if not file.is_file():
        return _converted(path) if any((path / name).is_file() for name in OLDER_FILES) else None
    try:
        inner = Inner.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{file}: not a tokenizer: {error}.") from None
    inner.no_padding()
    inner.no_truncation()
    return inner


def _converted(path: Path) -> Inner:
    """Older vocabularies go through transformers, which alone knows each family's conversion. Slow to import."""
    try:
        from transformers import AutoTokenizer

        fast = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        return Inner.from_str(fast.backend_tokenizer.to_str())
    except Exception as error:  # any family's conversion code
        reason = " ".join(str(error).split())[:300]
        raise ModelLoadError(f"{path}: its tokenizer files cannot be converted: {reason}") from None


def _template(path: Path, settings: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = settings.get("chat_template") or _json(path / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        by_name = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = by_name.get("default")
    return found if isinstance(found, str) else None


def _json(file: Path) -> dict[str, Any]:
    return parse(file.read_bytes(), file) if file.is_file() else {}


def _content(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)
