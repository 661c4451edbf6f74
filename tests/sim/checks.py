"""What must hold when everything rests: books, buffers, mailboxes, answers."""

from __future__ import annotations

from typing import Any

import numpy as np
from onecopy.runtime.rows.ledger import Ledger
from onecopy.runtime.rows.ops import Chain
from onecopy.runtime.rows.prefixes import Node, Prefixes
from onecopy.runtime.rows.segments import Segment, chain_tokens, links

from tests.sim import model
from tests.sim.laws import audit
from tests.sim.world import World


def check_rest(world: World) -> None:
    """All checkers, once no client runs any more and the system is still up."""
    bank: Any = world.system._supervisor.actor("bank")
    if bank is None:
        return
    world.device.finish()
    if world.device.failing:
        return  # buffers and books agree again once somebody has heard of it
    ledger: Ledger = bank._ledger
    for sentence in (*audit(ledger), *ledger.audit()):
        world.violate(sentence)
    _nothing_runs(world, bank)
    _buffers(world, ledger)
    _rows(world, ledger)
    _index(world, ledger)
    _copies(world, ledger)


def check_mailboxes(world: World, statistics: dict[str, Any], ended: bool) -> None:
    """No ask is owed, and every message that was accepted is accounted for."""
    for name, child in statistics["children"].items():
        actor, total = child["actor"], child["total"]
        if not actor:
            continue
        box = actor["mailbox"]
        if box["owed"]:
            world.violate(f"{name} owes {box['owed']} answers")
        down = child["dead"].get("down", 0)
        queued = box["control"] + box["work"]
        if total["accepted"] + down != total["handled"] + total["skipped"] + total["dead"] + queued:
            world.violate(f"{name} lost messages: {total}, {queued} queued, {down} told while down")
    gone = statistics["departed"]
    if (
        gone.get("accepted", 0) + gone.get("down", 0) > gone.get("handled", 0) + gone.get("skipped", 0) + gone["dead"]
        if "dead" in gone
        else False
    ):
        world.violate(f"sessions lost messages: {gone}")


def check_disk(world: World) -> None:
    """At the start of a life: what was acknowledged is there, and everything there is right."""
    actor: Any = world.system._supervisor.actor("rows store") if world.scenario.store is not None else None
    engine = actor._engine if actor is not None else None
    if engine is None:
        return
    with world.disk.quiet():
        if world.scenario.store.quota is None and not any(life.eio for life in world.scenario.store.lives):
            for key, record in world.kept.acked.items():
                if engine.locate(key) is None:
                    world.violate(f"an acknowledged record at row {record.start} is gone")
        for key in list(engine._shelf.index.entries):
            _check_record(world, engine, key)


def _check_record(world: World, engine: Any, key: bytes) -> None:
    """A record's rows are those of all tokens up to it."""
    chain = [engine.load(entry) for entry in engine.chain(key)]
    tokens = [t for stored in chain for t in stored.tokens]
    if chain[0].start or sum(len(s.tokens) for s in chain) != chain[-1].start + len(chain[-1].tokens):
        return  # its beginning was given up: nobody can find it
    first = model.first_rows(tokens, 0, world.kept.weights[chain[-1].fingerprint])
    second, sums = model.second_rows(first, 0, 0)
    start, tensors = chain[-1].start, chain[-1].tensors
    for layer, rows in enumerate((first, second)):
        found = tensors.get(f"{layer}.k")
        if found is not None and not np.array_equal(found.reshape(-1), rows[start:]):
            world.violate(f"the record at row {start} on disk, layer {layer}, has other rows than its tokens")
    entries = tensors.get("1.pooled")
    if entries is not None:
        low, high = start // model.RATIO * model.RATIO, len(tokens) // model.RATIO * model.RATIO
        if not np.array_equal(entries.reshape(-1), model.pooled(second[low:high], low)):
            world.violate(f"the record at row {start} on disk has other pooled entries than its rows")
    state = tensors.get("0.state.0")
    if state is not None and [int(x) for x in state] != [int(sums[-1]), len(tokens)]:
        world.violate(f"the record at row {start} on disk has another state than its rows")


def _nothing_runs(world: World, bank: Any) -> None:
    if bank._ledger.turns:
        world.violate(f"turns {sorted(bank._ledger.turns)} still have leases")
    if bank._queue:
        world.violate(f"{len(bank._queue)} turns still wait for memory")
    held = [s.id for s in bank._ledger.segments.values() if s.holds]
    stager: Any = world.system._supervisor.actor("stager") if world.scenario.store is not None else None
    if held and not (stager is not None and stager.statistics()["saving"]):
        world.violate(f"segments {held} are still held")
    lane: Any = world.system._supervisor.actor("lane")
    if lane is not None and lane._turns:
        world.violate(f"the lane still runs turns {sorted(lane._turns)}")


def _buffers(world: World, ledger: Ledger) -> None:
    """The device has the segments of the books, no others, and their bytes are the bytes accounted for."""
    pool = world.engine.pool
    if pool.segments.keys() != ledger.segments.keys():
        world.violate(f"segments {sorted(pool.segments.keys() ^ ledger.segments.keys())} differ in books and buffers")
    if not pool.bytes_held() == pool.held == ledger.used:
        world.violate(f"{pool.bytes_held()} bytes are held, {ledger.used} accounted for")
    if pool.forced:
        world.violate(f"{pool.forced} bytes were copied because a view was still alive")


def _rows(world: World, ledger: Ledger) -> None:
    """Every row that the books know is in its buffer, as one request alone would have computed it."""
    for s in ledger.segments.values():
        found = world.engine.pool.segments.get(s.id)
        if found is None or not s.tokens:
            continue
        if found.start != s.start or found.capacity != s.capacity:
            world.violate(
                f"segment {s.id} is {found.start}+{found.capacity} on the device, {s.start}+{s.capacity} in the books"
            )
            continue
        tokens = chain_tokens(s, s.frontier)
        first = model.first_rows(tokens, 0, world.life.weights)
        second, sums = model.second_rows(first, 0, 0)
        for layer, rows in enumerate((first, second)):
            if found.layers[layer].arrays and not np.array_equal(found.rows(layer)[: len(s.tokens)], rows[s.start :]):
                world.violate(f"rows of segment {s.id}, layer {layer}, are not those of its tokens")
        if world.scenario.layout == "qsa":
            _pooled(world, s, found.layers[1].entries, second)
        if ledger.layout.recurrent and s.live and s.tip is not None:
            _state(world, s, world.engine.pool.state(Chain(links(s, s.frontier), s.end)), int(sums[-1]))


def _state(world: World, s: Segment, state: Any, total: int) -> None:
    """A state that a turn may go on with is the one after all rows."""
    if [int(x) for x in np.asarray(state[0])] != [total, s.frontier]:
        world.violate(f"the state of segment {s.id} is not the one of its {s.frontier} rows")


def _pooled(world: World, s: Segment, entries: model.Words, second: model.Words) -> None:
    whole = s.frontier // model.RATIO * model.RATIO
    right = model.pooled(second[s.start : whole], s.start)
    if not np.array_equal(entries[: len(right)], right):
        world.violate(f"pooled entries of segment {s.id} are not those of its rows")


def _index(world: World, ledger: Ledger) -> None:
    """The prefix index is what an index built now from the segments would be."""
    fresh = Prefixes()
    salts = {s: ledger._prefixes.salt(s) for s in ledger.segments.values() if s in ledger._prefixes._edges}
    for s in sorted(ledger.segments.values(), key=lambda s: s.depth):
        if s.tokens:
            if s not in salts:
                world.violate(f"segment {s.id} cannot be found by its tokens")
                return
            fresh.update(s, salts[s])
    for salt, root in ledger._prefixes._roots.items():
        if _shape(root) != _shape(fresh._roots.get(salt, Node())):
            world.violate("the prefix index differs from one built now")


def _shape(node: Node) -> Any:
    holders = frozenset(s.id for s in node.holders)
    below = [(edge, _shape(child)) for edge, child in zip(node.edges, node.nodes, strict=True)]
    return holders, [(edge, shape) for edge, shape in below if shape != (frozenset(), [])]


def _copies(world: World, ledger: Ledger) -> None:
    """Every byte copied was counted, by reason."""
    counted = sum(ledger.totals.copied.values())
    banks = sum(event[1:] == ("up", "bank") for event in world.events)
    if (
        banks == 1
        and not world.scenario.fail_run
        and not world.scenario.fail_orders
        and world.engine.pool.copied != counted
    ):
        world.violate(f"{world.engine.pool.copied} bytes were copied, {counted} are counted")
