"""Errors of a block that a nursery wraps into groups, as they were raised."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

from onecopy.runtime.errors import OnecopyError

T = TypeVar("T")


@asynccontextmanager
async def bare(manager: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """`manager`, out of which errors of the block and of the one tree come as they are, not in a group of one."""
    raised: BaseException | None = None
    try:
        async with manager as value:
            try:
                yield value
            except BaseException as error:
                raised = error
                raise
    except BaseExceptionGroup as group:
        leaves = _leaves(group)
        if raised is not None and leaves == _leaves(raised):
            raise raised from raised.__cause__
        if len(leaves) == 1 and isinstance(leaves[0], OnecopyError):
            raise leaves[0] from leaves[0].__cause__
        raise


def _leaves(error: BaseException) -> list[BaseException]:
    """The errors that are no groups; a nursery rebuilds groups, but never what is in them."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in _leaves(inner)]


__all__ = ["bare"]
