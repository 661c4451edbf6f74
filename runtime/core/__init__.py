"""The actor core: typed messages, bounded mailboxes, one-shot replies, supervision. Knows nothing of models.

message.py     Message (a tell), Ask[R] (answered with an R), Envelope
reply.py       Reply[R]: set, fail; both say whether the asker will receive it
mailbox.py     control and work queues, both bounded; batch receive; owes every ask it accepted
ref.py         Ref: tell without waiting, ask with a deadline; stable over restarts
actor.py       Actor and @handles: start, run, after_batch, stopping, statistics
child.py       Child: how to make and keep an actor
supervisor.py  Supervisor: ordered start, reverse stop, rest-for-one, restart intensity, escalation

Everything here runs on the trio thread. Errors that are answers are OnecopyErrors; other exceptions crash an actor.
"""

from .actor import Actor, handles
from .child import Child, OnEvent, Restart
from .mailbox import Mailbox
from .message import Ask, Envelope, Message
from .ref import Ref
from .reply import Reply
from .supervisor import Supervisor

__all__ = [
    "Actor",
    "Ask",
    "Child",
    "Envelope",
    "Mailbox",
    "Message",
    "OnEvent",
    "Ref",
    "Reply",
    "Restart",
    "Supervisor",
    "handles",
]
