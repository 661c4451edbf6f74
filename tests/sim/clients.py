"""Clients: they follow their programs, and know what each answer has to be."""

from __future__ import annotations

import random
from contextlib import aclosing
from typing import Any

import trio
from onecopy.actors.service import Service
from onecopy.runtime.errors import Conflict, InsufficientMemory, NotFound, OnecopyError, Overloaded, Unavailable
from onecopy.runtime.rows.layout import BLOCK
from onecopy.runtime.turn import Finished, Sampling, Started, Text, TurnSpec

from tests.sim.model import CONTEXT, alone
from tests.sim.scenario import BASES, Branch, Care, Client, Rest, Say, Step
from tests.sim.world import World

TRIES = 3
"""Requests a client makes for one message before it gives up: a lane restarts once."""


class Talker:
    """One conversation of one client. history: what both have said so far, as tokens."""

    def __init__(self, world: World, name: str, salt: bytes, history: tuple[int, ...]) -> None:
        self.world = world
        self.name = name
        self.salt = salt
        self.history = history
        self.prompt: tuple[int, ...] = ()
        self.session: str | None = None
        self.rng = random.Random(f"{world.scenario.seed} {name}")

    @property
    def service(self) -> Service:
        return self.world.system

    async def follow(self, program: tuple[Step, ...]) -> None:
        for number, step in enumerate(program):
            match step:
                case Say():
                    await self.say(step)
                case Branch(programs):
                    await self.branch(number, programs)
                case Rest(seconds):
                    await trio.sleep(seconds)
                case Care():
                    await self.care(step)

    async def branch(self, number: int, programs: tuple[tuple[Step, ...], ...]) -> None:
        async with trio.open_nursery() as nursery:
            for i, program in enumerate(programs):
                child = Talker(self.world, f"{self.name}/{number}.{i}", self.salt, self.history)
                nursery.start_soon(child.follow, program)

    # --- a turn

    async def say(self, step: Say) -> None:
        self.prompt = self._prompt(step)
        spec = self._spec(step)
        if len(spec.tokens) + spec.max_new > CONTEXT:
            return
        for _ in range(TRIES):
            if await self._turn(step, spec):
                return
            await trio.sleep(0.01)

    def _prompt(self, step: Say) -> tuple[int, ...]:
        if step.again and self.prompt:
            return self.prompt
        prompt = self.history[: int(len(self.history) * step.keep)] + step.tokens
        if step.fill is not None:
            more = (-len(prompt) - step.fill) % BLOCK
            prompt += BASES[0][:more]
        return prompt

    def _spec(self, step: Say) -> TurnSpec:
        sampling = Sampling(step.seed, step.temperature, frequency_penalty=step.penalty)
        return TurnSpec(
            self.prompt,
            step.max_new,
            sampling,
            priority="background" if step.background else "normal",
            ignore_eos=step.ignore_eos,
            salt=self.salt,
        )

    async def _turn(self, step: Say, spec: TurnSpec) -> bool:
        """One request. False: it failed in a way that is worth another try."""
        got: list[int] = []
        end: Any = "left"
        try:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    if step.leave is not None:
                        nursery.start_soon(self._leave, step.leave, scope)
                    end = await self._read(step, spec, got, scope)
                    nursery.cancel_scope.cancel()
        except* OnecopyError as group:
            end = self._failed(group)
        self.world.log(self.name, "end", type(end).__name__, len(spec.tokens), len(got))
        self._check(spec, got, end)
        if isinstance(end, Finished) or got:
            self.history = spec.tokens + tuple(got)
        return not (isinstance(end, OnecopyError) and end.retry)

    def _failed(self, group: BaseExceptionGroup[OnecopyError]) -> OnecopyError:
        errors = list(_leaves(group))
        if len(errors) != 1:
            self.world.violate(f"one request failed in {len(errors)} ways: {errors}")
        return errors[0]

    async def _read(self, step: Say, spec: TurnSpec, got: list[int], scope: trio.CancelScope) -> Any:
        end: Any = None
        async with self.service.turn(spec) as stream, aclosing(stream) as pieces:
            seen = 0
            async for piece in pieces:
                if end is not None:
                    self.world.violate("a piece follows the last one")
                if isinstance(piece, Started):
                    self.session = piece.session
                    if not 0 <= piece.cached < len(spec.tokens):
                        self.world.violate(f"{piece.cached} of {len(spec.tokens)} prompt rows are called cached")
                if isinstance(piece, Text):
                    got += piece.tokens
                if isinstance(piece, Finished):
                    end = piece
                seen += 1
                if step.leave is not None and step.leave[0] == "pieces" and seen > step.leave[1]:
                    return "left"
                if step.slow:
                    await trio.sleep(step.slow)
        return end if end is not None else "nothing"

    async def _leave(self, leave: tuple[str, float], scope: trio.CancelScope) -> None:
        how, n = leave
        if how == "ticks":
            for _ in range(int(n)):
                await trio.lowlevel.checkpoint()
        elif how == "seconds":
            await trio.sleep(n)
        else:
            return
        scope.cancel()

    # --- what must hold of an answer

    def _check(self, spec: TurnSpec, got: list[int], end: Any) -> None:
        kind, weights = self.world.scenario.layout, self.world.life.weights
        right = alone(kind, spec.tokens, spec.max_new, spec.sampling, spec.ignore_eos, weights)
        if tuple(got) != right.tokens[: len(got)]:
            at = next(i for i, (a, b) in enumerate(zip(got, [*right.tokens, None], strict=False)) if a != b)
            self.world.violate(f"{self.name}: token {at} of the answer differs from the same request alone")
        if isinstance(end, Finished):
            self._check_finished(spec, got, end, right.tokens, right.reason)
        elif isinstance(end, OnecopyError):
            self._check_error(end)
        elif end != "left":
            self.world.violate(f"{self.name}: a request ends in {end!r}")

    def _check_finished(
        self, spec: TurnSpec, got: list[int], end: Finished, right: tuple[int, ...], reason: str
    ) -> None:
        if end.detail is None and (len(got) != len(right) or end.reason != reason):
            self.world.violate(f"{self.name}: {len(got)} tokens ({end.reason}), alone it has {len(right)} ({reason})")
        if end.usage.completion != len(got) or end.usage.prompt != len(spec.tokens):
            self.world.violate(f"{self.name}: {end.usage} for {len(got)} tokens")
        if end.receipt.rows_prefilled + end.usage.cached != len(spec.tokens):
            self.world.violate(f"{self.name}: {end.receipt} does not add up to {len(spec.tokens)} prompt rows")

    def _check_error(self, error: OnecopyError) -> None:
        expected: tuple[type[OnecopyError], ...] = (InsufficientMemory,)
        if not self.world.scenario.calm:
            expected += (Unavailable, Overloaded)
        if not isinstance(error, expected):
            self.world.violate(f"{self.name}: a request fails with {error!r}")

    # --- the conversation itself

    async def care(self, step: Care) -> None:
        try:
            await self._care(step)
        except (Conflict, NotFound, InsufficientMemory):
            return
        except (Unavailable, Overloaded) as error:
            if self.world.scenario.calm:
                self.world.violate(f"{self.name}: {step.what} fails with {error!r}")

    async def _care(self, step: Care) -> None:
        if step.what == "list":
            await self.service.sessions()
        elif self.session is None:
            return
        elif step.what == "drop":
            await self.service.drop(self.session)
        elif step.what == "fork":
            here = await self.service.session(self.session)
            info = await self.service.fork(self.session, int(here.tokens * step.at))
            if info.tokens > here.tokens:
                self.world.violate(f"a fork has {info.tokens} rows of {here.tokens}")
        else:
            await self.service.pin(self.session, step.what == "pin")


def _leaves(group: BaseExceptionGroup[Any]) -> Any:
    for error in group.exceptions:
        yield from _leaves(error) if isinstance(error, BaseExceptionGroup) else (error,)


async def run_client(world: World, number: int, client: Client) -> None:
    """One client from its begin to the end of its program."""
    await trio.sleep(client.begins)
    which, length = client.base
    salt, history = client.salt, BASES[which][:length]
    if client.resume is not None and world.past:
        salt, history = world.past[client.resume % len(world.past)]
    talker = Talker(world, f"c{number}", salt, history)
    await talker.follow(client.program)
    world.kept.histories.append((salt, talker.history))
    world.log(talker.name, "done")
