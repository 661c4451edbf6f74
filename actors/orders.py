"""The way of the books' orders to the device, and what is known of those that failed. A part of the bank."""

from __future__ import annotations

from collections.abc import Callable

from onecopy.runtime.rows.ledger import Conversation, Ledger
from onecopy.runtime.rows.ops import (
    Allocate,
    CopyRows,
    Drop,
    DropAnchor,
    LoadAnchor,
    ResizeLayer,
    RowOp,
    SaveAnchor,
    Trim,
)
from onecopy.runtime.seams.device import Device


class Orders:
    """Sends a ledger's orders in sequence. apply: carries them out, on the device thread."""

    def __init__(self, ledger: Ledger, device: Device, apply: Callable[[tuple[RowOp, ...]], object]) -> None:
        self._ledger = ledger
        self._device = device
        self._apply = apply
        self._undone: tuple[RowOp, ...] = ()

    def send(self) -> None:
        """Everything ordered since the last call."""
        orders = self._ledger.take_orders()
        if orders:
            self._device.post(self._carry_out, (*orders, Trim()) if _frees(orders) else orders)

    def _carry_out(self, orders: tuple[RowOp, ...]) -> None:
        """On the device thread. An error surfaces on its next call, whoever makes it; what was not made whole is gone
        until then, so that no round reads it."""
        try:
            self._apply(orders)
        except Exception:
            self._undone = (*self._undone, *orders)
            self._apply(tuple(Drop(segment) for segment in _made(orders)))
            raise

    def spoilt(self, conversation: Conversation) -> bool:
        """Orders for its buffers were not carried out: its rows may not be what the books say."""
        made = _made(self._undone)
        return bool(made) and any(s.id in made for s in conversation.tip.ancestors())

    def settle(self) -> None:
        """Once everything spoilt is given up: what was to be given back and was not goes back now."""
        gone = tuple(op for op in self._undone if isinstance(op, Drop | DropAnchor | Trim))
        self._undone = ()
        if gone:
            self._device.post(self._carry_out, gone)


def _frees(orders: tuple[RowOp, ...]) -> bool:
    return any(isinstance(op, Drop | ResizeLayer) for op in orders)


def _made(orders: tuple[RowOp, ...]) -> set[int]:
    """Segments whose buffers or states orders make, fill or move."""
    out = {op.target for op in orders if isinstance(op, CopyRows)}
    return out | {op.segment for op in orders if isinstance(op, Allocate | ResizeLayer | SaveAnchor | LoadAnchor)}
