"""Renders chat templates in a sandbox, with the names that templates written for Hugging Face use."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import BadRequest, ModelLoadError

_LARGEST = 1_000_000


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what to train on; for a prompt it is only its body."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """No private attributes, no changes to what it is given, bounded ranges, bounded products."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        size = max((len(x) for x in (left, right) if isinstance(x, str | list | tuple)), default=0)
        times = max((abs(x) for x in (left, right) if isinstance(x, int | float)), default=0)
        if operator == "**" or size * times > _LARGEST:
            raise SecurityError(f"the result of {operator!r} may be too large")
        return super().call_binop(context, operator, left, right)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for a prompt: unlike Jinja's own filter it escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


class Template:
    """One compiled chat template. wall: Unix seconds, for templates that write the date; None leaves it out.

    uses: the variables the template reads. Raises ModelLoadError when the source does not parse.
    """

    def __init__(self, source: str, wall: Callable[[], float] | None = None) -> None:
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        if wall is not None:
            environment.globals["strftime_now"] = lambda form: datetime.fromtimestamp(wall(), UTC).strftime(form)
        try:
            self.uses = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"The model's chat template does not parse: {error}") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text; raises BadRequest with the template's own words. A template may fail in any way on odd input."""
        try:
            return self._template.render(variables)
        except Exception as error:
            raise BadRequest(
                f"The model's chat template cannot render these messages: {_words(error)}", param="messages"
            ) from error


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
