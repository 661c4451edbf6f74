"""Decoding without a device loop: what a round carries, which token each row picks, which drafts stay.

plan.py      the round as a pure function of plain views: decode rows, one prefill chunk, share of time, priorities
want.py      what a row asks (`Want`), what it gets (`Pick`), and a conversation's rows with drafts (`wants_for`)
sampling.py  `pick`: lazy keyed sampling of a whole round on the device thread
edits.py     bias, penalties and grammar masks on logits; counts.py: the tokens the penalties count
logprobs.py  log probabilities of the raw model distribution; keys.py: (seed, position) -> random key
drafts.py    `Drafter`, `verify`, and how wide to draft from what was kept and what rounds cost
ngram.py     `NgramDrafter`: drafts copied from the conversation itself
offered.py   `OfferedDrafter`: drafts the device proposes; `drafter_for`: the drafter of a conversation, of both kinds
Only sampling, edits and logprobs touch MLX. Nothing here waits, reads a clock or keeps state between conversations.
"""

from .counts import Seen, TokenCounts
from .drafts import Drafter, DraftStats, Odds, Prices, Tally, Verdict, best_drafts, verify
from .keys import folded_seed, key_of
from .ngram import NgramDrafter
from .offered import OfferedDrafter, drafter_for
from .plan import Chunk, Costs, Decode, Limits, Round, View, chunk_end, passed_after, plan
from .sampling import Picked, pick
from .want import Pick, Want, wants_for

__all__ = [
    "Chunk",
    "Costs",
    "Decode",
    "DraftStats",
    "Drafter",
    "Limits",
    "NgramDrafter",
    "Odds",
    "OfferedDrafter",
    "Pick",
    "Picked",
    "Prices",
    "Round",
    "Seen",
    "Tally",
    "TokenCounts",
    "Verdict",
    "View",
    "Want",
    "best_drafts",
    "chunk_end",
    "drafter_for",
    "folded_seed",
    "key_of",
    "passed_after",
    "pick",
    "plan",
    "verify",
    "wants_for",
]
