"""Stop strings: found over any edge, with as little held back as possible."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onecopy.runtime.text.scan import Automaton, Scanner
from onecopy.runtime.text.stop import Stop

from tests.support.tokens import cut


def run(stops: tuple[str, ...], parts: list[str], include: bool = False) -> tuple[str, str | None]:
    stop = Stop(stops, include)
    spans = [span for part in parts for span in stop.feed(part)] + stop.flush()
    return "".join(span.text for span in spans), stop.hit


def by_hand(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """The definition: the first end, then the longest."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if stop and text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("at", range(1, 7))
def test_a_stop_string_is_found_over_every_edge(at: int) -> None:
    text = "xSTOP!y"
    assert run(("STOP!",), [text[:at], text[at:]]) == ("x", "STOP!")


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple),
    st.text("abc", max_size=30),
    st.lists(st.integers(0, 30)),
)
def test_any_stops_in_any_split_follow_the_definition(stops: tuple[str, ...], text: str, places: list[int]) -> None:
    assert run(stops, cut(text, places)) == by_hand(stops, text)


@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3), st.text("abc", max_size=30))
def test_held_back_is_exactly_what_may_still_become_a_stop(stops: list[str], text: str) -> None:
    scanner = Scanner(*stops)
    _, hit, _ = scanner.feed(text)
    longest = max(n for s in stops for n in range(len(s)) if n == 0 or text.endswith(s[:n]))
    assert hit is not None or len(scanner.held) == longest


def test_text_is_released_as_soon_as_it_cannot_be_a_stop() -> None:
    stop = Stop(("###END",))
    assert [span.text for span in stop.feed("a##")] == ["a"]
    assert [span.text for span in stop.feed("x")] == ["##x"]


def test_the_stop_can_be_kept_in_the_text() -> None:
    assert run(("END",), ["a E", "ND b"], include=True) == ("a END", "END")


def test_nothing_comes_after_a_stop() -> None:
    stop = Stop(("!",))
    assert "".join(span.text for span in stop.feed("a!b")) == "a"
    assert "".join(span.text for span in stop.feed("more")) == ""


def test_every_character_is_accounted_for() -> None:
    stop = Stop(("END",))
    spans = [*stop.feed("abcEN"), *stop.feed("D and the rest"), *stop.feed("more")]
    assert sum(span.raw for span in spans) == len("abcEND and the restmore")


def test_a_prefix_of_a_stop_at_the_end_is_text() -> None:
    assert run(("END",), ["done E", "N"]) == ("done EN", None)


def test_empty_stop_strings_are_ignored() -> None:
    assert run(("",), ["text"]) == ("text", None)


def test_many_overlapping_stops_cost_one_step_a_character(monkeypatch: pytest.MonkeyPatch) -> None:
    """Falling back is paid for by earlier advances: at most two node visits a character (Aho and Corasick)."""
    stops = tuple("a" * n + "b" for n in range(1, 60))
    steps = 0
    real = Automaton.step

    def counted(self: Automaton, state: int, c: str) -> int:
        nonlocal steps
        steps += 1
        return real(self, state, c)

    scanner = Scanner(*stops)
    monkeypatch.setattr(Automaton, "step", counted)
    for _ in range(1000):
        assert scanner.feed("aaaaaaaaac")[1] is None
    assert steps <= 10_000
