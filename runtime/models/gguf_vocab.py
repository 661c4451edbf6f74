"""A tokenizer from a GGUF file's metadata: byte-level BPE ("gpt2") and sentencepiece BPE ("llama")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onecopy.runtime.errors import ModelLoadError
from onecopy.runtime.text.tokenizer import Tokenizer
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Inner
from tokenizers.models import BPE

from .gguf_header import Header

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""Token types of ggml's vocabulary."""

END_NAMES = frozenset(
    {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<|endofturn|>"}
    | {"<end_of_turn>", "</s>"}
)
_SPACE_MARK = "\u2581"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_first() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(digits: str) -> Callable[[], Any]:
    pattern = f"{_CONTRACTIONS}|{_WORDS}|{digits}|{_TAIL}"

    def build() -> Any:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


SPLITS: dict[str, Callable[[], Any]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "gpt2": _gpt2,
    "smollm": _digits_first,
    "starcoder": _digits_first,
    "llama-bpe": _split(r"\p{N}{1,3}"),
    "llama3": _split(r"\p{N}{1,3}"),
    "llama-v3": _split(r"\p{N}{1,3}"),
    "qwen2": _split(r"\p{N}"),
    "deepseek-r1-qwen": _split(r"\p{N}"),
}
"""How text is cut before merging, by `tokenizer.ggml.pre`."""


def tokenizer_of(header: Header) -> Tokenizer:
    """The file's tokenizer with its chat template. ModelLoadError for a vocabulary kind that is not supported."""
    try:
        return _tokenizer(header)
    except ModelLoadError:
        raise
    except Exception as error:  # the library raises bare Exception, and metadata may hold any type anywhere
        raise ModelLoadError(f"{header.path}: its vocabulary is damaged: {error}.") from None


def _tokenizer(header: Header) -> Tokenizer:
    meta = header.metadata
    tokens = _tokens(header)
    kinds = meta.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise ModelLoadError(f"{header.path}: the vocabulary's token types do not match its tokens.")
    inner = _build(header, tokens)
    inner.add_special_tokens(_added(tokens, kinds, {CONTROL, UNKNOWN}))
    inner.add_tokens(_added(tokens, kinds, {USER_DEFINED}))
    bos = meta.get("tokenizer.ggml.bos_token_id")
    if meta.get("tokenizer.ggml.add_bos_token", meta["tokenizer.ggml.model"] == "llama") and bos is not None:
        inner.post_processor = _bos_first(tokens[bos], bos)
    control = [i for i, kind in enumerate(kinds) if kind in (CONTROL, UNKNOWN, UNUSED)]
    return Tokenizer(
        inner,
        eos_ids=_ends(meta, tokens, kinds),
        bos_id=bos,
        template=meta.get("tokenizer.chat_template"),
        names=_names(meta, tokens),
        control=control,
    )


def _tokens(header: Header) -> list[str]:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ModelLoadError(f"{header.path}: the metadata holds no vocabulary ('tokenizer.ggml.tokens').")
    rows = header.tensors["token_embd.weight"].shape[0]
    if len(tokens) > rows:
        raise ModelLoadError(f"{header.path}: the vocabulary has {len(tokens)} tokens, the embedding {rows} rows.")
    for key in ("bos", "eos", "unknown", "padding"):
        if header.metadata.get(f"tokenizer.ggml.{key}_token_id", 0) >= len(tokens):
            header.metadata.pop(f"tokenizer.ggml.{key}_token_id")
    return tokens


def _build(header: Header, tokens: list[str]) -> Inner:
    model = header.metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        return _byte_level(header, tokens)
    if model == "llama":
        return _sentencepiece(header, tokens)
    raise ModelLoadError(f"{header.path}: the vocabulary kind {model!r} is not supported; supported are gpt2, llama.")


def _byte_level(header: Header, tokens: list[str]) -> Inner:
    pre = header.metadata.get("tokenizer.ggml.pre", "default")
    if pre not in SPLITS:
        raise ModelLoadError(
            f"{header.path}: the text split {pre!r} is not supported; supported are {', '.join(SPLITS)}."
        )
    merges = [_pair(merge) for merge in header.metadata.get("tokenizer.ggml.merges", [])]
    vocab = {token: i for i, token in enumerate(tokens)}
    whole_words = pre in ("llama-bpe", "llama3", "llama-v3")
    inner = Inner(BPE(vocab=vocab, merges=_known(merges, vocab), ignore_merges=whole_words))
    if "qwen" in pre:
        inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = SPLITS[pre]()
    inner.decoder = decoders.ByteLevel()
    return inner


def _sentencepiece(header: Header, tokens: list[str]) -> Inner:
    scores = header.metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise ModelLoadError(f"{header.path}: the sentencepiece vocabulary has no scores.")
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = header.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    inner = Inner(
        BPE(
            vocab=vocab,
            merges=_scored_merges(vocab, scores),
            unk_token=tokens[unknown],
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    prefix = header.metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE_MARK)
    inner.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), spaces]) if prefix else spaces
    parts = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return inner


def _scored_merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Merges in the order sentencepiece BPE would take them: by the score of what they make, best first."""
    found = []
    for piece, index in vocab.items():
        cuts = ((piece[:k], piece[k:]) for k in range(1, len(piece)))
        pairs = sorted((vocab[a], vocab[b], a, b) for a, b in cuts if a in vocab and b in vocab)
        found += [(-scores[index], index, rank, (a, b)) for rank, (_, _, a, b) in enumerate(pairs)]
    return [pair for *_, pair in sorted(found)]


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _known(merges: list[tuple[str, str]], vocab: dict[str, int]) -> list[tuple[str, str]]:
    return [(a, b) for a, b in merges if a in vocab and b in vocab and a + b in vocab]


def _added(tokens: list[str], kinds: list[int], wanted: set[int]) -> list[AddedToken]:
    special = CONTROL in wanted
    return [
        AddedToken(token, special=special, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in wanted and token
    ]


def _bos_first(token: str, index: int) -> Any:
    return processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", token, "$B"], special_tokens=[(token, index)]
    )


def _ends(meta: dict[str, Any], tokens: list[str], kinds: list[int]) -> set[int]:
    """Ids that end a reply: the declared ones, and control tokens whose name says so."""
    declared = {meta.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")} - {None}
    named = {i for i, kind in enumerate(kinds) if kind == CONTROL and tokens[i] in END_NAMES}
    return declared | named  # type: ignore[return-value]


def _names(meta: dict[str, Any], tokens: list[str]) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: meta.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None}
