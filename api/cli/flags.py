"""Flags that several commands share, and values as people write them."""

from __future__ import annotations

import argparse
import re
from typing import Any

import platformdirs
from onecopy.actors.service import Options

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def size(text: str) -> int:
    """Bytes from "512MiB", "8GB", "8g" or a plain number. Units are powers of 1024 unless they end in plain B."""
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 8GB or 512MiB")
    base = 1000 if found[2] and found[3].lower() == "b" else 1024
    return int(float(found[1]) * base ** _POWERS[found[2].lower()])


def share(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def add_arithmetic_flags(parser: Any) -> None:
    """Off by default: each of them can change answers."""
    told = "keep attention rows quantized, which changes answers; a check at load says by how much (off)"
    parser.add_argument("--kv-bits", type=int, choices=[8, 4], help=told)
    add_fast(parser)


def add_fast(parser: Any) -> None:
    told = "skip the search for exact arithmetic: batches, forks, restores and drafts may then change a token (off)"
    parser.add_argument("--fast", action="store_true", help=told)


def add_system_flags(parser: Any) -> None:
    """The flags that `system_options` reads."""
    parser.add_argument("model", nargs="?", default="smollm2", help="bundled name, directory or GGUF file (smollm2)")
    parser.add_argument("--name", help="the id clients see")
    parser.add_argument("--memory", type=size, metavar="SIZE", help="memory for conversations, e.g. 8GB")
    parser.add_argument("--context", type=count, metavar="TOKENS", help="tokens at most in one conversation")
    parser.add_argument("--parallel", type=count, default=8, metavar="N", help="conversations in one round (8)")
    parser.add_argument("--dtype", choices=["float32", "native"], help="how weights are held")
    add_arithmetic_flags(parser)
    parser.add_argument("--decode-share", type=share, default=0.25, help="time for replies while prompts fill (0.25)")
    parser.add_argument("--no-draft", action="store_true", help="never draft")
    parser.add_argument("--drafter", metavar="DIR", help="a block drafter for the model (DFlash)")
    parser.add_argument("--store", metavar="DIR", help="where rows are kept on disk")
    parser.add_argument("--no-store", action="store_true", help="keep no rows on disk")
    parser.add_argument("--store-quota", type=size, metavar="SIZE", help="disk space for rows, e.g. 50GB")


def default_store() -> str:
    """Where rows are kept when no `--store` is given: the user's cache, which a clean-up may empty without harm."""
    return str(platformdirs.user_cache_path("onecopy") / "rows")


def system_options(args: argparse.Namespace) -> Options:
    return Options(
        model=args.model,
        name=args.name,
        memory=args.memory,
        context=args.context,
        parallel=args.parallel,
        dtype=args.dtype,
        kv_bits=args.kv_bits,
        fast=args.fast,
        store="" if args.no_store else args.store or default_store(),
        store_quota=args.store_quota,
        decode_share=args.decode_share,
        draft=not args.no_draft,
        drafter=args.drafter,
    )
