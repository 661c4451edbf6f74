"""One seeded life of a rows store on a simulated disk: work, faults, restarts, power cuts, and what must hold after."""

import random
from collections.abc import Callable

from onecopy.runtime.errors import StoreUnusable
from onecopy.runtime.store import Record, RowsOnDisk
from onecopy.runtime.store.portable import Memory, export_image, import_image

from tests.sim.disk import Faults, PowerCut, SimDisk
from tests.support.rows import DAY, open_store, records_of, same, talk


class Violation(AssertionError):
    """Something promised does not hold."""


class StoreRun:
    """Drives one store by `seed`. known: records acknowledged and not dropped since, which must read back.

    quota: None makes eviction impossible, so that nothing acknowledged may ever go. make: how the disk is made.
    imports: conversations come from another machine's store, too.
    """

    def __init__(
        self,
        seed: int,
        *,
        quota: int | None = None,
        faulty: bool = False,
        imports: bool = False,
        make: Callable[..., SimDisk] = SimDisk,
    ) -> None:
        self.rng = random.Random(seed)
        self.quota = quota
        self.faulty = faulty
        self.imports = imports
        self.disk = make(Faults(random.Random(seed)))
        self.known: dict[bytes, Record] = {}
        self.now = DAY
        self.cuts = 0
        self.store = self._open()

    def run(self, steps: int = 25) -> None:
        """Raises Violation at the first broken promise."""
        self._arm()
        for _ in range(steps):
            self.now += self.rng.randrange(200)
            try:
                self._step()
            except PowerCut:
                self._power_comes_back()
                self.check()
                self._arm()
        self._calm()
        self.check()

    def check(self) -> None:
        """Everything acknowledged reads back, and everything in the index has its data."""
        for key, record in self.known.items():
            if self.quota is not None and self.store.locate(key) is None:
                continue
            if not same(self.store, record):
                raise Violation(f"an acknowledged record is gone after {self.cuts} cuts")
        result = self.store.verify()
        if result.bad or result.unread or result.skipped:
            raise Violation(f"index entries without their data: {result}")
        if self.quota is not None and self.store.statistics()["disk_bytes"] > self.quota:
            raise Violation("over the quota")

    def _step(self) -> None:
        steps = [(self._put, 10), (self._drop, 2), (self._sweep, 4), (self._touch, 1), (self._restart, 1)]
        steps += [(self._import, 6)] if self.imports else []
        step = self.rng.choices([step for step, _ in steps], weights=[weight for _, weight in steps])[0]
        try:
            step()
        except (OSError, StoreUnusable):
            if not self.faulty:
                raise

    def _put(self) -> None:
        base = talk(self.rng.randrange(6), 2048)
        n = self.rng.randrange(1, 2048)
        records = records_of(base[:n], anchor=self.rng.random() < 0.5, width=1)
        records = records[-self.rng.randrange(1, 5) :]
        for key in self.store.put(records):
            self.known[key] = next(r for r in records if r.key == key)

    def _import(self) -> None:
        """A conversation as a file of another store, whose records are all there once the call is back."""
        records = records_of(
            talk(self.rng.randrange(6), 2048)[: self.rng.randrange(257, 2048)], anchor=self.rng.random() < 0.5, width=1
        )
        elsewhere = open_store(SimDisk())
        elsewhere.put(records)
        import_image(self.store, Memory(export_image(elsewhere, records[-1].key)), b"")
        self.known |= {record.key: record for record in records}

    def _drop(self) -> None:
        if self.known:
            keys = self.rng.sample(sorted(self.known), min(len(self.known), self.rng.randrange(1, 6)))
            for key in keys:
                del self.known[key]
            self.store.drop(keys)
            self.store.commit()

    def _sweep(self) -> None:
        for _ in range(self.rng.randrange(1, 6)):
            self.store.sweep_step(most=self.rng.choice((1, 10_000)), dead=self.rng.choice((0.05, 0.5)))

    def _touch(self) -> None:
        self.store.note_use(list(self.known)[:3])

    def _restart(self) -> None:
        """The process is killed and starts again; the machine stays up."""
        self.disk.restart()
        self.store = self._open()

    def _arm(self) -> None:
        faults = self.disk.faults
        faults.cut_after = self.disk.medium.calls + self.rng.randrange(1, 400)
        if self.faulty:
            faults.eio, faults.enospc, faults.short = 0.02, 0.03, 0.2

    def _calm(self) -> None:
        self.disk.faults.eio = self.disk.faults.enospc = self.disk.faults.short = 0.0
        self.disk.faults.cut_after = None
        self._restart()

    def _power_comes_back(self) -> None:
        self.cuts += 1
        self.disk.cut(self.rng)
        self._calm()

    def _open(self) -> RowsOnDisk:
        while True:
            try:
                quota = {} if self.quota is None else {"quota": self.quota}
                return open_store(self.disk, wall=lambda: self.now, **quota)
            except StoreUnusable:
                if not self.faulty:
                    raise
