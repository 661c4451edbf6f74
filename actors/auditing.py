"""Audits of the bank's books while it is idle: what does not add up is logged once, counted and kept for `/health`.

Part of the bank, not an actor: it reads the books from the bank's own tasks and changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from onecopy.runtime.rows.ledger import Ledger
from onecopy.runtime.seams.clock import Clock

LOG = logging.getLogger("onecopy.bank")

STEP = 1000
"""Segments and conversations looked at in one go: a few milliseconds, then whoever waits comes first."""

SHOWN = 20
"""Sentences kept for `/health`; all are counted."""


class Auditing:
    """The last audit's findings. broken: laws that do not hold, as sentences with their numbers.

    changes: a number that moves with every message that may have changed the books.
    """

    def __init__(self, ledger: Ledger, clock: Clock, changes: Callable[[], int]) -> None:
        self._ledger = ledger
        self._clock = clock
        self._changes = changes
        self._seen = -1
        self._logged: set[str] = set()
        self.audits = 0
        self.found = 0
        self.broken: tuple[str, ...] = ()

    async def audit(self) -> None:
        """Goes over all books, unless a turn runs or nothing has changed. No verdict when they change meanwhile."""
        changes = self._changes()
        if changes == self._seen or self._ledger.turns:
            return
        found: list[str] = []
        for number, sentence in enumerate(self._ledger.laws(), 1):
            if sentence is not None:
                found.append(sentence)
            if number % STEP == 0:
                await self._clock.sleep(0)
                if self._changes() != changes:
                    return
        self._seen = changes
        self._conclude(found)

    def _conclude(self, found: list[str]) -> None:
        self.audits += 1
        self.broken = tuple(found[:SHOWN])
        for sentence in found:
            if sentence not in self._logged:
                self._logged.add(sentence)
                self.found += 1
                LOG.error("the bank's books are wrong: %s", sentence)
