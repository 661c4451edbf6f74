"""A step: a few tokens after given tokens, for frameworks that run the loop themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from onecopy.actors.service import Service
from onecopy.runtime.errors import BadRequest
from onecopy.runtime.turn import FinishReason, Receipt, TokenLogprob, TurnSpec, Usage

from .codec import convert
from .openai.completions import order_of
from .openai.types import CompletionRequest
from .order import Prompt, encode_text, plain_side, specs
from .reply import Reply
from .settings import Asker, refuse_unknown


class StepSettings(TypedDict, total=False):
    """All optional; names, ranges and defaults are those of `POST /v1/completions`."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[str, float]
    seed: int
    stop: str | list[str]
    ignore_eos: bool
    guided_regex: str
    guided_json: dict[str, Any]
    guided_grammar: str
    draft: bool
    cache_salt: str


@dataclass(frozen=True, slots=True)
class Step:
    """What came after `prompt`. logprobs: one a token when asked for, with the best alternatives (token, value, bytes).

    text: the tokens as text. reason "stop": an end token, a stop text or a finished constraint.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    reason: FinishReason
    usage: Usage
    receipt: Receipt
    seed: int
    token_sha: str

    @property
    def all(self) -> tuple[int, ...]:
        """Prompt and tokens: the prompt of the next step, which then computes new rows only."""
        return self.prompt + self.tokens

    @property
    def logprob(self) -> float:
        """Log probability (natural log) of all tokens together; 0 when none was asked for."""
        return math.fsum(item.logprob for item in self.logprobs)

    @classmethod
    def of(cls, prompt: tuple[int, ...], reply: Reply) -> Step:
        end = reply.end
        return cls(
            prompt,
            tuple(reply.tokens),
            reply.text(),
            tuple(reply.logprobs),
            end.reason,
            end.usage,
            end.receipt,
            end.seed,
            end.token_sha,
        )


async def step_spec(
    service: Service,
    prompt: str | Sequence[int],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    choices: Sequence[str] | None,
    settings: Mapping[str, Any],
) -> TurnSpec:
    """The turn behind a step. Raises BadRequest that names the field."""
    refuse_unknown(settings, StepSettings)
    card = service.card
    tokens = await encode_text(card, prompt) if isinstance(prompt, str) else tuple(prompt)
    guided = {"guided_choice": list(choices)} if choices is not None else {}
    wanted = convert({"logprobs": logprobs, "max_tokens": max_tokens, **guided, **settings}, CompletionRequest, "")
    order = order_of(wanted, Asker(service))
    if max_tokens is None:
        order = replace(order, max_new=_longest(service, choices) if choices else 1)
    [spec] = specs(service, order, Prompt(tokens), param="prompt")
    return spec


def _longest(service: Service, choices: Sequence[str]) -> int:
    """Tokens that the longest choice and its end may take, however the text is cut into tokens."""
    plain_side(service.card)
    most = max(len(choice.encode()) for choice in choices)
    if most == 0:
        raise BadRequest("A choice needs options, none of them empty.", param="choices")
    return most + 1


__all__ = ["Step", "StepSettings", "step_spec"]
