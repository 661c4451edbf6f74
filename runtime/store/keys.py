"""Content addresses: the key of a block says which tokens, after which tokens, computed how, for whom.

Two equal keys mean equal rows, so a block is stored once whoever asks, and no two conversations can be mixed up.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from blake3 import blake3

from ..rows.layout import BLOCK

KEY_BYTES = 32
ROOT = bytes(KEY_BYTES)
"""The key before block 0."""

_ANCHOR = "onecopy rows store, version 1, anchor"


def fingerprint(facts: Mapping[str, object]) -> bytes:
    """32 bytes over everything that decides a row's bits: weights digest, config, cache dtype, layout, numerics mode.

    `facts` must be JSON values; the order of its keys does not matter.
    """
    return blake3(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).digest()


def block_key(parent: bytes, tokens: Sequence[int], fingerprint: bytes, salt: bytes) -> bytes:
    """The key of one whole block. The order of the hashed parts is fixed; only `salt`, the last, varies in length."""
    return blake3(parent + _ids(tokens) + fingerprint + salt).digest()


def anchor_key(parent: bytes, tail: Sequence[int], fingerprint: bytes, salt: bytes) -> bytes:
    """The key of an anchor `len(tail)` tokens (0 to 255) past the block `parent`. Never equal to a block's key."""
    return blake3(parent + _ids(tail) + fingerprint + salt, derive_key_context=_ANCHOR).digest()


def block_keys(tokens: Sequence[int], fingerprint: bytes, salt: bytes) -> Iterator[bytes]:
    """The keys of the whole blocks of `tokens`, in order, one at a time: stop at the first that is missing."""
    parent = ROOT
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        parent = block_key(parent, tokens[start : start + BLOCK], fingerprint, salt)
        yield parent


def _ids(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype="<u4").tobytes()
