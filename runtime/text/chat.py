"""From messages to a prompt, by the model's own chat template; and what the template says about replies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import BadRequest, Unsupported
from ..turn import Tool
from .formats import ToolFormat, described, infer, tool_format
from .messages import normalised, tools_in_text
from .reasoning import KNOWN_TAGS, Tags
from .template import Template
from .tokenizer import Tokenizer

_OURS = frozenset({"messages", "tools", "add_generation_prompt"})


class ChatFormat:
    """A tokenizer and its chat template. Immutable; render as often as you like.

    template: the Jinja source, by default the tokenizer's. wall: Unix seconds for templates that write a date.
    A template that knows no tools gets them described in the system message.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: str | None = None, *, wall: Callable[[], float] | None = None
    ) -> None:
        source = template if template is not None else tokenizer.template
        if source is None:
            raise Unsupported("The model has no chat template.")
        self._tokenizer = tokenizer
        self._source = source
        self._template = Template(source, wall)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. messages: OpenAI's shape. kwargs: further variables (`enable_thinking`, ...).

        Raises BadRequest with the template's own words when it refuses the messages.
        """
        if not messages:
            raise BadRequest("A chat needs at least one message.", param="messages")
        if taken := _OURS & set(kwargs or ()):
            raise BadRequest(f"chat_template_kwargs cannot set {min(taken)}.", param="chat_template_kwargs")
        variables = {**self._tokenizer.names, **(kwargs or {}), **self._conversation(messages, tools)}
        return self._template.render({**variables, "add_generation_prompt": add_generation_prompt})

    def tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt's ids. The template writes its own first token, so none is added. Names of control tokens are
        control tokens wherever they stand, in a user's text too: Hugging Face's behaviour, kept for equal prompts.
        """
        text = self.render(messages, tools, add_generation_prompt=add_generation_prompt, kwargs=kwargs)
        return self._tokenizer.encode(text)

    def _conversation(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> dict[str, Any]:
        plain = normalised(messages)
        if not self.knows_tools:
            return {"messages": tools_in_text(plain, tools), "tools": None}
        return {"messages": plain, "tools": [described(tool) for tool in tools] or None}

    @cached_property
    def opener(self) -> int | None:
        """The control token that every message begins with, or every one of a user; None where the template has none.

        It is what a longer chat has more of, and has first: no text of a template has to be understood.
        """
        one = [{"role": "user", "content": "a"}]
        more = [*one, {"role": "assistant", "content": "b"}, *one]
        try:
            few, many = (self.tokens(chat, add_generation_prompt=False) for chat in (one, more))
        except BadRequest:
            return None
        grown = (t for t in many if self._tokenizer.is_special(t) and 1 <= many.count(t) - few.count(t) <= 2)
        return next(grown, None)

    def starts(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Where messages start in a prompt, in order; one that starts the prompt is not among them."""
        if self.opener is None:
            return ()
        return tuple(int(i) for i in np.flatnonzero(np.asarray(tokens) == self.opener) if i)

    @property
    def knows_tools(self) -> bool:
        """Whether the template itself renders tools."""
        return "tools" in self._template.uses

    @cached_property
    def tool_format_name(self) -> str | None:
        """How replies write tool calls; None when the template uses a way we cannot read."""
        return infer(self._source, self._in_vocabulary) or (None if self.knows_tools else "json_tools")

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """The reader of that format (loads mlx-lm)."""
        return tool_format(self.tool_format_name) if self.tool_format_name else None

    @cached_property
    def tags(self) -> Tags | None:
        """How replies mark thinking; None for a model that does not think."""
        return next(filter(self._has_tags, KNOWN_TAGS), None)

    @property
    def thinks(self) -> bool:
        """Whether replies may begin with thinking."""
        return self.tags is not None

    @cached_property
    def thinking_opened_by_prompt(self) -> bool:
        """Whether an ordinary prompt already ends in the opening tag."""
        try:
            return self.opened_by(self.render([{"role": "user", "content": "?"}]))
        except BadRequest:
            return False

    def opened_by(self, prompt: str) -> bool:
        """Whether this rendered prompt ends in the opening tag, so that the reply begins inside thinking."""
        return self.tags is not None and prompt.rstrip().endswith(self.tags.open)

    def _in_vocabulary(self, name: str) -> bool:
        return self._tokenizer.token_id(name) is not None

    def _has_tags(self, tags: Tags) -> bool:
        both = (tags.open, tags.close)
        return all(tag in self._source for tag in both) or all(map(self._in_vocabulary, both))
