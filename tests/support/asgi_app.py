"""The importable app with a script for a model: what a server process loads in tests."""

from __future__ import annotations

from typing import Any
from unittest import mock

from onecopy.api import asgi
from onecopy.api.runtime import Runtime

from tests.support.scripted import Say, ScriptedService


def scripted(service: ScriptedService) -> Any:
    """A patch under which every runtime that is opened runs `service`."""

    def opened(model: str = "", **options: Any) -> Any:
        return Runtime.over(service)

    return mock.patch.object(Runtime, "open", opened)


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(name)
    scripted(ScriptedService(Say("Hello."))).start()
    return asgi.create([])
