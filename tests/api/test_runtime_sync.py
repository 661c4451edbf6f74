"""The programmatic API from plain code: the same conversations, from any thread, ended by interrupts and timeouts."""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import trio
from onecopy import api
from onecopy.api import aio, sync
from onecopy.api.portal import NAME
from onecopy.api.sync import Conversation, Runtime
from onecopy.runtime.errors import ActorStopped, BadRequest, DeadlineExceeded, Overloaded, StartupError
from onecopy.runtime.turn import Finished, Started, Text

from tests.support.scripted import Say, ScriptedService

ENDLESS = Say("na ", ends=False, between=lambda: trio.sleep(0.001))


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == NAME]


def test_pieces_and_answers() -> None:
    with Runtime.over(ScriptedService("Hello.")) as runtime:
        chat = runtime.conversation("Be brief.")
        pieces = list(chat.send("hi"))
        answer = chat.send("again").answer()
    assert isinstance(pieces[0], Started)
    assert isinstance(pieces[-1], Finished)
    assert "".join(p.text for p in pieces if isinstance(p, Text)) == answer.text == "Hello."
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant", "user", "assistant"]


def test_forks_sessions_steps_and_status() -> None:
    with Runtime.over(ScriptedService("abc")) as runtime:
        chat = runtime.conversation()
        chat.send("hi").answer()
        child = chat.fork(at=4)
        assert child.info().parent == child.parent == chat.session
        assert chat.pin().pinned
        assert chat.park().state == "parked"
        chat.drop()
        assert chat.session is None
        assert runtime.step("x", max_tokens=2).text == "ab"
        assert runtime.status().model == runtime.card.id


def test_errors_are_raised_as_they_are() -> None:
    with Runtime.over(ScriptedService(Say(refuse=Overloaded("Full.")))) as runtime:
        with pytest.raises(Overloaded):
            runtime.conversation().send("hi").answer()
        with pytest.raises(BadRequest):
            runtime.conversation(temperature=9)
    with pytest.raises(KeyError), Runtime.over(ScriptedService()):
        raise KeyError("mine")
    with pytest.raises(StartupError, match="memroy"), Runtime.open("smollm2", memroy=1):  # type: ignore[call-arg]
        pass


def test_a_timeout_ends_the_turn() -> None:
    service = ScriptedService(ENDLESS)
    with Runtime.over(service) as runtime:
        with pytest.raises(DeadlineExceeded):
            runtime.conversation().send("hi", timeout=0.05).answer()
        assert service.active == 0


def test_leaving_a_block_ends_the_turn() -> None:
    service = ScriptedService(ENDLESS)
    with Runtime.over(service) as runtime:
        with runtime.conversation().send("hi") as sent:
            next(sent)
        assert service.active == 0


@pytest.fixture
def _interrupts() -> Iterator[None]:
    """As on a terminal: a program that a shell started in the background ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts")
def test_an_interrupt_while_waiting_ends_the_turn() -> None:
    once = iter([trio.lowlevel.checkpoint])
    service = ScriptedService(Say("na ", ends=False, between=lambda: next(once, trio.sleep_forever)()))
    main = threading.get_ident()
    with Runtime.over(service) as runtime:
        chat = runtime.conversation()
        sent = chat.send("hi")
        next(sent)
        timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            sent.answer()
        timer.join()
        assert (service.active, service.cancelled) == (0, 1)
        assert not chat.running


def test_closing_the_runtime_ends_what_other_threads_wait_for() -> None:
    service = ScriptedService(ENDLESS)
    with ThreadPoolExecutor(1) as pool:
        with Runtime.over(service) as runtime:
            chat = runtime.conversation()
            sent = chat.send("hi")
            next(sent)
            waiting = pool.submit(sent.answer)
        assert isinstance(waiting.exception(30), ActorStopped)
    assert service.active == 0
    with pytest.raises(ActorStopped):
        chat.send("hi").answer()


def test_any_thread_may_call() -> None:
    with Runtime.over(ScriptedService("Hello.")) as runtime, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda i: runtime.conversation().send(f"{i}").answer(), range(16)))
    assert {answer.text for answer in answers} == {"Hello."}


def test_children_run_their_own_code_in_threads() -> None:
    def twice(chat: Conversation, prompt: int) -> int:
        first, second = chat.send(f"{prompt}").answer(), chat.send("again").answer()
        return prompt + len(first.text) + len(second.text)

    with Runtime.over(ScriptedService("abc")) as runtime:
        children = runtime.spawn(runtime.conversation(), [1, 2, 3], run=twice, limit=2).results()
        assert [child.result for child in children] == [7, 8, 9]
        assert [len(child.chat.messages) for child in children] == [4, 4, 4]
        assert children[0].chat.send("and more").answer().text == "abc"
        [plain] = runtime.spawn(runtime.conversation(), ["hi"]).results()
        assert plain.result.text == "abc"


def test_the_first_error_ends_the_others_at_their_next_call() -> None:
    ended: list[type[BaseException]] = []

    def work(chat: Conversation, prompt: int) -> None:
        if prompt == 1:
            raise LookupError("one")
        try:
            chat.send("for ever").answer()
        except BaseException as error:
            ended.append(type(error))
            raise

    with Runtime.over(ScriptedService(ENDLESS)) as runtime:
        with pytest.raises(LookupError):
            runtime.spawn(runtime.conversation(), [0, 1], run=work).results()
        assert ended == [ActorStopped]
        [failed] = runtime.spawn(runtime.conversation(), [1], run=work, on_error="collect").results()
        assert isinstance(failed.error, LookupError)


# --- one API in three places


def parameters(function: Any) -> list[str]:
    return [str(p).split(":")[0] for p in inspect.signature(function).parameters.values()]


def surface(module: Any, name: str) -> dict[str, Any]:
    """Public methods of a class with their parameters, and its properties."""
    found: dict[str, Any] = {}
    for attribute, value in inspect.getmembers(getattr(module, name)):
        if not attribute.startswith("_"):
            call = value if callable(value) else None
            found[attribute] = (
                [str(p).split(":")[0] for p in inspect.signature(call).parameters.values()] if call else ""
            )
    return found


ADAPTERS_OWN = {
    "Runtime": {"start", "children"},
    "Conversation": {"end", "home", "defaults"},
    "Sent": set(),
    "Spawn": set(),
}


@pytest.mark.parametrize("name", list(ADAPTERS_OWN))
@pytest.mark.parametrize("module", [aio, sync])
def test_names_and_parameters_are_the_same_everywhere(module: Any, name: str) -> None:
    there, here = surface(api, name), surface(module, name)
    fields = set(getattr(api, name).__dict__.get("__dataclass_fields__", ()))
    assert {n for n in there if n not in ADAPTERS_OWN[name] | fields} <= set(here)
    for attribute in set(here) & set(there) - fields:
        assert here[attribute] == there[attribute], attribute
    assert {n for n in fields if not n.startswith("_")} - ADAPTERS_OWN[name] <= set(here)
