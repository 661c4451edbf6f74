"""API keys: where they come from, how one is recognised, and the salt that keeps its conversations apart."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onecopy.runtime.errors import StartupError, Unauthorized

log = logging.getLogger("onecopy.api")


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls. salt separates the conversations of one key from those of another; empty without keys."""

    label: str = ""
    salt: bytes = b""


ANYONE = Principal()


@dataclass(slots=True)
class Keys:
    """The accepted keys as digests. A key file is read again when it changes; a broken new version changes nothing."""

    fixed: Mapping[bytes, Principal] = field(default_factory=dict)
    path: Path | None = None
    read: Mapping[bytes, Principal] = field(default_factory=dict)
    stamp: tuple[int, int, int] | None = None

    @classmethod
    def open(cls, keys: Iterable[str] = (), path: str | None = None) -> Keys:
        """Keys from flags or environment, and from a file. Raises `StartupError` for an unusable file."""
        made = cls(fixed=_digests(keys), path=Path(path) if path else None)
        if made.path:
            made.stamp, made.read = _load(made.path)
        return made

    @property
    def wanted(self) -> bool:
        """Whether callers need a key. A key file asks for one even while it is empty."""
        return bool(self.fixed) or self.path is not None

    def principal(self, key: str | None) -> Principal:
        """Who `key` belongs to. Compares with every digest, so time tells nothing about which one came close."""
        if not self.wanted:
            return ANYONE
        self._refresh()
        digest = _digest(key or "")
        found = [who for known, who in {**self.read, **self.fixed}.items() if hmac.compare_digest(known, digest)]
        if not key or not found:
            raise Unauthorized("A valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY.")
        return found[0]

    def _refresh(self) -> None:
        if self.path is None or _stamp(self.path) == self.stamp:
            return
        try:
            self.stamp, self.read = _load(self.path)
        except StartupError as error:
            log.warning("key file kept as it was: %s", error)
        else:
            log.info("key file read again: %d keys", len(self.read))


def presented(headers: Mapping[str, str]) -> str | None:
    """The key a request carries, in either style. Authorization wins."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key")


def split_key(entry: str) -> tuple[str, str]:
    """An entry as (label, key). Without a label the key's digest names it."""
    label, colon, key = entry.partition(":")
    return (label.strip(), key.strip()) if colon else (_digest(entry.strip()).hex()[:8], entry.strip())


def _digests(entries: Iterable[str]) -> dict[bytes, Principal]:
    pairs = [split_key(entry) for entry in entries if entry.strip()]
    return {_digest(key): Principal(label, _salt(key)) for label, key in pairs if key}


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _salt(key: str) -> bytes:
    return hashlib.sha256(b"onecopy salt\0" + key.encode()).digest()[:16]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _load(path: Path) -> tuple[tuple[int, int, int] | None, dict[bytes, Principal]]:
    stamp = _stamp(path)
    try:
        with path.open(encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise StartupError(f"The key file {path} is open to others (mode {mode:04o}); make it 0600.")
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"The key file {path} cannot be read: {error}.") from None
    return stamp, _digests(line for line in lines if not line.lstrip().startswith("#"))
