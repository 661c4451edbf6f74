"""`python -m tests.sim.soak --minutes 60`: a real server on loopback under busy clients, and what is left when they go.

Small on purpose: a tiny random model, little memory for rows and a small quota on disk, so that forks, refusals,
evictions, saves and restores happen all the time. Ends with 1 when memory, handles, tasks or rows do not come back to
where they were, or when a reply differs from the same request with nothing kept.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import random
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import trio
from onecopy.runtime.errors import NotFound

from tests.support.system import Whole, body, serving, user, write_tiny

ROWS, QUOTA = 3 << 20, 24 << 20
CLIENTS = 6
SPARE = 48 << 20
"""Bytes by which the process may have grown: allocators keep some, whatever is freed."""


@dataclass(frozen=True, slots=True)
class Level:
    """What a resting server has. handles: open files and sockets. memory: bytes of the process."""

    memory: int
    handles: int
    tasks: int
    threads: int
    conversations: int
    row_bytes: int
    broken_laws: int = 0

    def above(self, before: Level) -> list[str]:
        """What did not come back, as sentences."""
        out = []  # trio keeps idle worker threads for ten seconds, hence some more of them
        if self.memory > before.memory * 1.1 + SPARE:
            out.append(f"memory grew from {before.memory >> 20} to {self.memory >> 20} MiB")
        for name, more in (
            ("handles", 2),
            ("tasks", 0),
            ("threads", 16),
            ("conversations", 0),
            ("row_bytes", 0),
            ("broken_laws", 0),
        ):
            if getattr(self, name) > getattr(before, name) + more:
                out.append(f"{name} grew from {getattr(before, name)} to {getattr(self, name)}")
        return out


@dataclass(slots=True)
class Soak:
    """Clients with programs of their own. did: what they did, by name. wrong: what must not have happened."""

    whole: Whole
    rng: random.Random
    did: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def run(self, seconds: float) -> None:
        """Keeps all clients busy for so long."""
        end = trio.current_time() + seconds
        async with trio.open_nursery() as nursery:
            for number in range(CLIENTS):
                nursery.start_soon(self._client, random.Random(f"{self.rng.random()} {number}"), end)

    async def _client(self, rng: random.Random, end: float) -> None:
        said: list[dict[str, str]] = []
        while trio.current_time() < end:
            said = await self._step(rng, said)
            if len(said) > 12 or rng.random() < 0.1:
                said = []

    async def _step(self, rng: random.Random, said: list[dict[str, str]]) -> list[dict[str, str]]:
        what = rng.choices(("say", "stream", "leave", "edit", "compare", "care"), (6, 6, 3, 2, 1, 2))[0]
        self.did[what] += 1
        asked = [*said, user(_words(rng))]
        wanted = body(*asked, max_tokens=rng.choice((1, 8, 24)), seed=rng.randrange(1 << 30))
        if what == "leave":
            await self.whole.leave(wanted, rng.randrange(4))
            return said
        if what == "edit":
            return said[: rng.randrange(len(said) + 1) // 2 * 2]
        if what == "care":
            await self._care(rng)
            return said
        text = await self._reply({**wanted, "stream": what == "stream"})
        if what == "compare" and text is not None:
            await self._compare(wanted)
        return said if text is None else [*asked, {"role": "assistant", "content": text}]

    async def _reply(self, wanted: dict[str, Any]) -> str | None:
        """The text, "" for a stream; None when the server had no memory for it."""
        answer = await self.whole.post(wanted)
        self.did[str(answer.status_code)] += 1
        if answer.status_code in (429, 503):
            return None
        if answer.status_code != 200:
            self.wrong.append(f"{answer.status_code}: {answer.text[:200]}")
            return None
        return "" if wanted["stream"] else str(answer.json()["choices"][0]["message"]["content"])

    async def _compare(self, wanted: dict[str, Any]) -> None:
        """The same request twice, once with nothing kept: the same tokens, if this machine's arithmetic is exact."""
        if self.whole.system.card.exactness != "exact":
            return
        kept = await self.whole.post(wanted)
        fresh = await self.whole.post({**wanted, "cache_salt": f"cold {self.rng.random()}"})
        if kept.status_code == fresh.status_code == 200:
            tokens = [a.json()["choices"][0]["token_ids"] for a in (kept, fresh)]
            # An answer ends early where there is no memory for more rows.
            least = min(map(len, tokens))
            if tokens[0][:least] != tokens[1][:least]:
                self.wrong.append(f"a reply differs from the same request with nothing kept: {tokens}")

    async def _care(self, rng: random.Random) -> None:
        """Something done to a conversation, from outside."""
        listed = (await self.whole.http.get("/v1/sessions")).json()["data"]
        if not listed:
            return
        path = f"/v1/sessions/{rng.choice(listed)['id']}"
        way = rng.choice(("fork", "park", "delete"))
        answer = await (self.whole.http.delete(path) if way == "delete" else self.whole.http.post(f"{path}/{way}"))
        if answer.status_code >= 500 and answer.status_code != 503:
            self.wrong.append(f"{way}: {answer.status_code} {answer.text[:200]}")

    async def level(self) -> Level:
        """The server with nothing to do and nothing kept."""
        await self.whole.at_rest()
        while kept := await self.whole.system.sessions():
            for found in kept:
                with contextlib.suppress(NotFound):  # it went with one that shared all of it
                    await self.whole.system.drop(found.id)
        await self.whole.http.aclose()
        await trio.sleep(1.0)
        gc.collect()
        numbers = await self.whole.at_rest()
        process = psutil.Process()
        return Level(
            process.memory_info().rss,
            process.num_fds() + len(process.net_connections()),
            _tasks(trio.lowlevel.current_root_task()),
            threading.active_count(),
            numbers["bank"]["conversations"],
            numbers["bank"]["bytes_used"],
            numbers["bank"]["broken_laws"],
        )


def _words(rng: random.Random) -> str:
    return " ".join(rng.choices(("alpha", "beta", "gamma", "delta"), k=rng.choice((3, 20, 60, 120))))


def _tasks(task: trio.lowlevel.Task | None) -> int:
    if task is None:
        return 0
    return 1 + sum(_tasks(child) for nursery in task.child_nurseries for child in nursery.child_tasks)


async def soak(seconds: float, seed: int = 1) -> tuple[Soak, list[str]]:
    """A warm-up of a tenth, then the rest; what the second left behind that the first did not."""
    with tempfile.TemporaryDirectory() as directory:
        model = write_tiny(Path(directory) / "tiny")
        async with serving(model, rows=ROWS, store=f"{directory}/store", store_quota=QUOTA) as whole:
            first = Soak(whole, random.Random(seed))
            await first.run(seconds / 10)
            before = await first.level()
            second = Soak(await _again(whole), random.Random(seed + 1))
            await second.run(seconds * 9 / 10)
            after = await second.level()
            return second, [*first.wrong, *second.wrong, *after.above(before)]


async def _again(whole: Whole) -> Whole:
    """The same server with a new client: the old one's connections are closed, to be counted."""
    return Whole(whole.system, whole.server, httpx.AsyncClient(base_url=whole.server.url, timeout=60.0))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    done, wrong = trio.run(soak, options.minutes * 60, options.seed)
    print(f"{sum(done.did.values())} steps: {dict(done.did)}")
    for sentence in wrong[:20]:
        print(sentence)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
