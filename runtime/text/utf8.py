"""Bytes to text, one request at a time: only complete characters leave."""

from __future__ import annotations

import codecs


class Utf8:
    """Incremental UTF-8 decoder with its own state.

    A sequence that may still become a character is kept; bytes that cannot become one turn into U+FFFD, one per
    maximal invalid part (Unicode 3.9, "substitution of maximal subparts"), the same however the bytes were split.
    """

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, raw: bytes) -> str:
        """Take more bytes, return the characters they complete."""
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """End of input: a cut character becomes U+FFFD. The decoder is fresh afterwards."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text

    @property
    def pending(self) -> bool:
        """Whether bytes of an unfinished character are held."""
        return bool(self._decoder.getstate()[0])
