"""A model's chat template is somebody else's program: it sees the messages, and nothing else of this process."""

from __future__ import annotations

import pytest
from onecopy.runtime.errors import BadRequest, ModelLoadError
from onecopy.runtime.text.template import Template

MARK = "root:"
ESCAPES = (
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ [].__class__.__mro__[1].__subclasses__()[40]('/etc/passwd').read() }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['__builtins__'].open('/etc/passwd').read() }}",
    "{{ strftime_now.__globals__ }}",
    "{{ strftime_now.func_globals }}",
    "{{ strftime_now.__code__.co_consts }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ range.__self__ }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ messages|attr('__class__') }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ messages['__class__'] }}{{ ''['__class__']['__mro__'] }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "{{ '{0[0].__class__}'.format_map({'0': messages}) }}",
    "{{ ('{0.__globals__}'|format)(raise_exception) }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ [raise_exception]|map(attribute='__globals__')|list }}",
    "{{ [raise_exception]|groupby('__globals__') }}",
    "{{ [raise_exception]|sum(attribute='__globals__') }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% extends '/etc/passwd' %}",
    "{% from 'os' import popen %}{{ popen('id') }}",
    "{{ config }}{{ request.application.__globals__ }}",
    "{{ messages[0].clear() }}{{ messages[0].update({'content': 'x'}) }}",
    "{% set messages[0] = 1 %}",
    "{% set x = messages.pop() %}{{ x }}",
    "{{ messages.sort() }}{{ messages.reverse() }}",
    "{{ (lambda: 1)() }}",
    "{{ caller.__globals__ }}",
    "{% macro m() %}{{ caller.__globals__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "{{ ().__class__.__bases__ }}{{ {}.__class__ }}{{ 1 .__class__ }}",
    "{{ loop.__class__ }}{% for a in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{{ 'x'.encode().__class__ }}",
    "{% for k in raise_exception.__dict__ %}{{ k }}{% endfor %}",
    "{{ tojson.__globals__ }}{{ messages|tojson(default=raise_exception) }}",
)
TELLS = ("__builtins__", "<module", "<class", "object at 0x", "site-packages", MARK, "uid=", "mappingproxy")


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_cannot_reach_out(source: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    try:
        text = Template(source, wall=lambda: 0.0).render({"messages": messages})
    except (BadRequest, ModelLoadError):
        text = ""
    assert not any(tell in text for tell in TELLS), text[:200]
    assert messages == [{"role": "user", "content": "hello"}]


INJECTED = ("{{ 7*7 }}", "{% for a in range(3) %}x{% endfor %}", "{# note #}", "{{ raise_exception('x') }}", "${7*7}")


@pytest.mark.parametrize("text", INJECTED)
def test_a_message_is_never_read_as_a_template(text: str) -> None:
    shown = Template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}").render(
        {"messages": [{"role": "user", "content": text}]}
    )
    assert shown == f"user: {text}\n"
