"""The doors and the programmatic API: everything clients and programs touch.

runtime.py        Runtime: open a model, hold conversations, spawn children, take steps (trio)
aio.py, sync.py   the same for asyncio and for plain code, over a thread that runs trio (portal.py)
conversation.py   Conversation; sent.py: one turn; answer.py: a whole answer; spawn.py: children; step.py: steps
feed.py           work in a nursery that somebody reads; settings.py: a turn's keyword arguments; prompts.py: tokenising
app.py            the HTTP routes, over openai/ and anthropic/; asgi.py: for any ASGI server
exchange.py       a request's turns (turns.py) written to its client; order.py: from messages to turn specs
gate.py, safety.py, errors.py, meter.py   who may come in, API keys, errors on the wire, counts
server.py, cli/   hypercorn on trio, and the command line
"""

from onecopy.runtime.errors import OnecopyError
from onecopy.runtime.turn import (
    Finished,
    Piece,
    Prefilling,
    Queued,
    Reasoning,
    Receipt,
    Started,
    Text,
    TokenLogprob,
    Tool,
    ToolCall,
    Usage,
)

from .answer import Answer, Requested
from .conversation import Conversation
from .runtime import Runtime, Status
from .sent import Sent
from .spawn import Child, Spawn
from .step import Step

__all__ = [
    "Answer",
    "Child",
    "Conversation",
    "Finished",
    "OnecopyError",
    "Piece",
    "Prefilling",
    "Queued",
    "Reasoning",
    "Receipt",
    "Requested",
    "Runtime",
    "Sent",
    "Spawn",
    "Started",
    "Status",
    "Step",
    "Text",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "Usage",
]
