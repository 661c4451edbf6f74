"""Keeping chains short: the newest segments of a chain copied into one."""

from __future__ import annotations

from .books import Books
from .grants import count
from .pricing import Merge
from .reclaim import make_room
from .segments import Segment


def merge(books: Books, tip: Segment, beside: int) -> tuple[Segment, int]:
    """Copies the newest segments of a chain into one, so that sizes stay geometric: the new tip and bytes copied.

    Where that cannot be afforded with `beside` bytes left over, the chain stays as it is. The segments merged go,
    unless somebody else reads them.
    """
    path = _newest(tip)
    first, written = path[-1], tip.frontier - path[-1].start
    rows = tip.end - first.start
    way = Merge(tuple(s.capacity for s in path), written, rows)
    price = books.bill(way)
    if price is None or not make_room(books, price + beside, tip):
        return tip, 0
    made = books.allocate(first.parent, first.start, rows)
    moved = 0
    stops = [s.start for s in path[:-1]] if len(path) > 1 else []
    for s, stop in zip(reversed(path), [*reversed(stops), tip.frontier], strict=True):
        moved += books.copy(s, made, s.start, stop, None)
    count(books.totals.copied, "merge", moved)
    made.reply_from, made.saved, made.live = tip.reply_from, tip.saved, tip.live
    assert tip.tip is not None
    conversation = books.conversations[tip.tip]
    books.end_at(conversation, made)
    books.index(made, conversation.salt)
    books.drop_free(tip)
    return made, moved


def _newest(tip: Segment) -> list[Segment]:
    """The newest two segments of the chain, and older ones while they are no longer than twice what is newer."""
    path = list(tip.ancestors())
    upto, rows = 1, tip.end - tip.start
    while upto < len(path) - 1 and (path[upto].end - path[upto].start <= 2 * rows or upto < 2):
        rows = tip.end - path[upto].start
        upto += 1
    return path[:upto]
