"""The text machinery between tokens and clients: prompts in, replies out. Pure and synchronous; state is per request.

tokenizer.py    Tokenizer: one class for every source of a vocabulary
chat.py         ChatFormat: messages to prompts by the template (template.py, messages.py), and its facts about replies
reader.py       Reader: tokens to pieces, through utf8.py, reasoning.py, tools.py and stop.py
scan.py         Automaton, Scanner: several strings in a stream, the least held back; spans.py: what stages pass on
formats.py      ToolFormat: the ways models write calls, by mlx-lm's parsers; bodies.py and ledger.py read them
arguments.py    Arguments: a call's JSON shown while it is written (json_walk.py) and typed by its schema (coerce.py)
grammar.py      Grammars, Matcher: which tokens may come next, through llguidance
forced.py       forced_calls: the grammar behind tool_choice
"""

from .chat import ChatFormat
from .forced import chosen, forced_calls
from .formats import ToolFormat, tool_format
from .grammar import Grammars, Matcher
from .reader import Reader, callable_tools
from .reasoning import Tags
from .tokenizer import Tokenizer

__all__ = [
    "ChatFormat",
    "Grammars",
    "Matcher",
    "Reader",
    "Tags",
    "Tokenizer",
    "ToolFormat",
    "callable_tools",
    "chosen",
    "forced_calls",
    "tool_format",
]
