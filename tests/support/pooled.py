"""A pool whose pooled entries (QSA) a test writes and reads by hand."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from onecopy.runtime.rows.buffers import Pool, put
from onecopy.runtime.rows.transfer import believed, row_ratios

Host = np.ndarray[Any, Any]


class QsaPool(Pool):
    """Entries `[heads, n, width]` are numbered from a segment's first one."""

    def enter(self, segment: int, layer: int, entries: dict[str, mx.array], frontier: int) -> int:
        """Takes what a foreign state of `frontier` rows claims, as a restore would; how many are kept."""
        ratios, kept = row_ratios(self.layout), 0
        rows = {f"{layer}.{t.name}": np.empty((0, frontier)) for t in self.layout.layers[layer].rows}
        claimed = {f"{layer}.{name}": np.array(array) for name, array in entries.items()}
        own = {key: ratio for key, ratio in ratios.items() if key.startswith(f"{layer}.")}
        for key, array in believed({**rows, **claimed}, own, 0, 0).items():
            if key in claimed:
                kept = array.shape[1]
                self.write_pooled(segment, layer, key.partition(".")[2], 0, mx.array(array))
        return kept

    def write_pooled(self, segment: int, layer: int, name: str, first: int, entries: mx.array) -> None:
        buffer = self.segments[segment].layers[layer].pooled[name]
        put(buffer, first, entries)
        mx.eval(buffer)

    def pooled_views(self, segment: int, start: int, stop: int) -> dict[str, Host]:
        """The entries that rows `[start, stop)` complete, keyed `layer.name`."""
        origin = self.segments[segment].start
        return {
            f"{i}.{name}": np.array(buffer, copy=False)[:, start // r - origin // r : stop // r - origin // r]
            for i, (kept, layer) in enumerate(zip(self.layout.layers, self.segments[segment].layers, strict=True))
            for r in (kept.ratio,)
            for name, buffer in layer.pooled.items()
        }
