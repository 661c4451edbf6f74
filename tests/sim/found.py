"""Scenarios that once broke a promise, written down whole: seeds change their meaning when the grammar does."""

from __future__ import annotations

from dataclasses import replace

from onecopy.runtime.rows.layout import BLOCK

from tests.sim.scenario import BASES, Branch, Client, Crash, Life, Rest, Say, Scenario, Store


def say(n: int, max_new: int = 5, **rest: object) -> Say:
    """A message of `n` tokens."""
    return Say(BASES[0][:n], max_new, 1, **{"ignore_eos": True, **rest})  # type: ignore[arg-type]


def plain(*clients: Client, **rest: object) -> Scenario:
    return Scenario(1, "attention", 1000, 8, clients, **rest)  # type: ignore[arg-type]


def leaves_at(tick: int) -> Scenario:
    """Two talk on a slow device, one goes away: its cancel once overtook its begin, and a lane ran without a lease."""
    gone = Client((say(9, leave=("ticks", tick)), say(9, leave=("ticks", tick + 1))))
    return plain(Client((say(600, 20),)), gone, Client((say(30, 20),)), slow=1.0)


OVER_THE_EDGE = plain(
    Client((say(30, 20, fill=7), Rest(8.0), say(1, 20, again=True, temperature=1.0), say(255), Rest(8.0))),
    store=Store((Life(), Life((Client((say(1),)),)))),
)
"""A reply over a block's edge is saved, then another takes its place: its rows once went to disk under the old keys."""

NARROW = plain(*(Client((say(20 + i, 20), say(300, 20))) for i in range(4)), mailbox=2, slow=1.0)
"""Mailboxes of two: a commit that the bank could not take once took the lane down with it."""


def leaves_while_restoring(seconds: float) -> Scenario:
    """Somebody goes away while the rows come from a slow disk, into a segment that the next request takes over."""
    program = (
        say(300, 256, leave=("pieces", 3)),
        Say(BASES[0][300:700], 5, 1, keep=300 / 302.5, ignore_eos=True, leave=("seconds", seconds)),
        Say(BASES[1][:300], 20, 1, keep=300 / 302.5, ignore_eos=True),
    )
    lives = (Life(), Life((Client(program),), rate=2e4))
    return plain(Client((say(900), Rest(9.0))), slow=0.02, store=Store(lives))


CRASH_WHILE_RESTORING = plain(
    Client((say(900), Rest(9.0))),
    crashes=(Crash("lane", 12, after=False),),
    store=Store((Life(), Life((Client((say(9, 20),), resume=0), Client((say(9, 20),), resume=0)), rate=3e4))),
)
"""The lane goes down while rows still come from a slow disk."""

NO_BUFFER = plain(Client((say(300), say(20, keep=0.5), say(30))), fail_orders=(3,))
"""A fork's copy fails on the device: its rows, which were never copied, must not be read or found again."""

STATES_LEFT = replace(
    plain(Client((say(62, 20), Rest(5.0), say(30, 20), Rest(40.0), say(30, 20), Rest(5.0)))),
    layout="recurrent",
    crashes=(Crash("stager", 1, after=False),),
    store=Store((Life(),)),
)
"""The stager goes down with a save of a recurrent state, and the bank with it: copies of states once stayed."""


def held_meanwhile(seed: int) -> Scenario:
    """One goes back into a reply, which plans a resize; another goes on behind it and so holds its rows. Both wait for
    memory behind a third, so that they are admitted in one batch of the bank's messages, in either order."""
    back = Say(BASES[1][:9], 5, 1, keep=505 / 699.5, ignore_eos=True)
    reads = Say(BASES[1][:9], 400, 1, keep=0.5, ignore_eos=True, slow=0.05)
    all_three = Branch(((reads,), (Rest(3.0), back), (Rest(3.0), say(20))))
    talks = Client((say(500, 200), Rest(50.0), all_three))
    fills = Client((say(1100, 300),), begins=54.0, base=(1, 1100))
    more = Client((say(250, 300),), begins=54.0, salt=b"more")
    waits = Client((say(700),), begins=54.2, base=(1, 1100), salt=b"other")
    made = plain(talks, fills, more, waits, fixed=2 * BLOCK, drafts=1, slow=0.1)
    return replace(made, seed=seed, blocks=18)


def bank_crashes_at(message: int) -> Scenario:
    """The bank goes down after one of its messages, with orders that give states back not yet sent."""
    return replace(STATES_LEFT, crashes=(Crash("bank", message, after=True),))
