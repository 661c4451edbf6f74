"""Small tokenizers for tests: a real byte-level one, and one whose tokens are whatever a test says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import tokenizers
from onecopy.runtime.text.tokenizer import Tokenizer
from tokenizers import decoders, models, pre_tokenizers

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Tools in the JSON style, thinking kept only in the last assistant turn (as Qwen3's own template does).
THINKING = """
{%- if tools %}<|im_start|>system
# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}
{%- set ns = namespace(query=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content and loop.index0 > ns.query %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for tool_call in message.tool_calls %}
<tool_call>
{"name": "{{ tool_call.function.name }}", "arguments": {{ tool_call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% else %}<think>
{% endif %}{% endif %}"""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def byte_tokenizer(template: str | None = CHATML, *, special: Sequence[str] = SPECIAL) -> Tokenizer:
    """One token per byte (ids 0 to 255), then the tags, then the control tokens; <|im_end|> ends a reply."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens([tokenizers.AddedToken(tag, special=False, normalized=False) for tag in ADDED])
    inner.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in special])
    ends = [inner.token_to_id(name) for name in special if name in ("<|im_end|>", "<|endoftext|>")]
    return Tokenizer(inner, eos_ids=ends, template=template, names={"eos_token": "<|im_end|>", "bos_token": ""})


class Script:
    """A vocabulary in which token i is exactly `pieces[i]`: text, raw bytes, or (in `control`) a control token."""

    def __init__(self, pieces: Iterable[str | bytes], *, control: Iterable[str] = (), eos: Iterable[str] = ()) -> None:
        self.pieces = list(pieces)
        self.control = set(control) | set(eos)
        self.eos_ids = frozenset(i for i, piece in enumerate(self.pieces) if piece in set(eos))

    @property
    def ids(self) -> range:
        """The script itself: each token once, in order."""
        return range(len(self.pieces))

    def is_special(self, token: int) -> bool:
        return self.pieces[token] in self.control

    def token_bytes(self, token: int) -> bytes:
        piece = self.pieces[token]
        return b"" if self.is_special(token) else piece if isinstance(piece, bytes) else piece.encode()

    def token_text(self, token: int) -> str:
        piece = self.pieces[token]
        return piece if isinstance(piece, str) else piece.decode("latin-1")

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")


def cut(whole: str | bytes, places: Iterable[int]) -> list[str] | list[bytes]:
    """`whole` cut at these places (taken modulo its length; duplicates and the ends do no harm)."""
    inside = sorted({place % (len(whole) + 1) for place in places} - {0, len(whole)})
    edges = [0, *inside, len(whole)]
    return [whole[a:b] for a, b in pairwise(edges)]  # type: ignore[return-value]
