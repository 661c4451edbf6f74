"""Thinking and answer, split at the tags and nowhere else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onecopy.runtime.text.reasoning import KNOWN_TAGS, Splitter, Tags
from onecopy.runtime.text.scan import Automaton

from tests.support.tokens import cut

THINK = Tags("<think>", "</think>")


def run(parts: list[str], *, tags: Tags = THINK, opened: bool = False) -> tuple[str, str]:
    """(thinking, answer); checks that every character was accounted for."""
    splitter = Splitter(tags, opened)
    spans = [span for part in parts for span in splitter.feed(part)] + splitter.flush()
    assert sum(span.raw for span in spans) == sum(map(len, parts))
    return tuple("".join(s.text for s in spans if s.kind == kind) for kind in ("reasoning", "text"))  # type: ignore[return-value]


@pytest.mark.parametrize("tags", KNOWN_TAGS, ids=lambda tags: tags.open)
def test_known_tags_split_at_every_character(tags: Tags) -> None:
    text = f"{tags.open}\nwhy not\n{tags.close}\n\nBecause."
    for at in range(len(text) + 1):
        assert run([text[:at], text[at:]], tags=tags) == ("why not", "Because.")


@pytest.mark.parametrize("opened", [False, True])
def test_one_character_at_a_time(opened: bool) -> None:
    text = ("" if opened else "<think>") + "a < b </thin k></think>c </think> d"
    assert run(list(text), opened=opened) == ("a < b </thin k>", "c </think> d")


def test_tags_in_a_code_block_of_the_answer_are_the_answer() -> None:
    answer = "Use:\n```\n<think>x</think>\n```\n"
    assert run([f"<think>t</think>{answer}"]) == ("t", answer)


def test_a_tag_quoted_by_an_answer_without_thinking_is_the_answer() -> None:
    assert run(["The tag <think> opens", " it, </think> closes."]) == (
        "",
        "The tag <think> opens it, </think> closes.",
    )


def test_thinking_that_never_closes_stays_thinking() -> None:
    assert run(["<think>", "half a thou", "ght</thi"]) == ("half a thought</thi", "")


def test_newlines_at_the_end_of_unclosed_thinking_are_not_lost() -> None:
    assert run(["so\n", "\n"], opened=True) == ("so\n\n", "")


def test_newlines_inside_thinking_stay() -> None:
    assert run(["a\n", "\n", "b\n", "</think>", "\n", "c\n"], opened=True) == ("a\n\nb", "c\n")


def test_a_template_that_opened_the_tag_begins_in_thinking() -> None:
    assert run(["why</th", "ink>yes"], opened=True) == ("why", "yes")


def test_a_model_that_repeats_the_opened_tag_shows_no_markup() -> None:
    assert run(["<thi", "nk>\nwhy</think>yes"], opened=True) == ("why", "yes")


def test_empty_thinking_is_no_thinking() -> None:
    assert run(["<think>\n\n</think>\n\nyes"]) == ("", "yes")


def test_space_before_an_answer_without_thinking_is_kept() -> None:
    assert run(["  ", "\n<", "b>"]) == ("", "  \n<b>")


def test_a_reply_of_space_only_is_the_answer() -> None:
    assert run([" ", "\n"]) == ("", " \n")


def test_channel_marks_around_the_answer_are_not_shown() -> None:
    tags = KNOWN_TAGS[-1]
    text = f"{tags.open}hm<|end|><|start|>assistant<|channel|>final<|message|>Hi<|end|>"
    assert run(list(text), tags=tags) == ("hm", "Hi")


@given(st.text("a<>/thinkэ\n ", max_size=30), st.lists(st.integers(0, 60)), st.booleans())
def test_any_split_of_any_text_reads_as_the_whole(text: str, places: list[int], opened: bool) -> None:
    assert run(cut(text, places), opened=opened) == run([text], opened=opened)


@given(st.lists(st.sampled_from(["<think>", "</think>", "<thi", "nk>", "\n", "x", " "]), max_size=12), st.booleans())
def test_tags_in_any_order_read_the_same_in_any_split(parts: list[str], opened: bool) -> None:
    assert run(parts, opened=opened) == run(["".join(parts)], opened=opened) == run(list("".join(parts)), opened=opened)


def test_long_thinking_costs_at_most_one_step_a_character(monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 characters full of near misses; what is held never exceeds the tag."""
    text = "</think </thin </thi < " * 870
    splitter = Splitter(THINK, opened=True)
    steps = 0
    real = Automaton.step

    def counted(self: Automaton, state: int, c: str) -> int:
        nonlocal steps
        steps += 1
        return real(self, state, c)

    monkeypatch.setattr(Automaton, "step", counted)
    used = 0
    for at, c in enumerate(text, 1):
        used += sum(span.raw for span in splitter.feed(c))
        assert at - used < len(THINK.close)
    assert len(text) > 20_000
    assert steps <= len(text)
