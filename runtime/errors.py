"""Every error a user can meet, as one tree. Each class knows its HTTP status, its code and whether a retry helps.

OnecopyError                       500 internal_error
├── RestartIntensityExceeded       500 internal_error         an actor kept crashing; its supervisor gave up (exit 1)
├── BadRequest                     400 invalid_request        the request itself is wrong; `param` names the field
│   ├── ContextLengthExceeded      400 context_length_exceeded
│   └── Unsupported                400 unsupported            understood, but not offered here
├── Unauthorized                   401 invalid_api_key
├── Forbidden                      403 forbidden              wrong Host or Origin, another key's session
├── NotFound                       404 not_found
│   └── ModelNotFound              404 model_not_found
├── MethodNotAllowed               405 method_not_allowed
├── Conflict                       409 conflict               the session is busy or in the wrong state
├── TooLarge                       413 request_too_large
├── Overloaded                     429 overloaded             a mailbox or the queue is full; retry
├── InsufficientMemory             503 insufficient_memory    refused by the bank; the numbers are in the message
├── Unavailable                    503 unavailable            stopping, restarting; retry
│   ├── ActorStopped               503 actor_stopped
│   ├── LaneCrashed                503 lane_crashed           the round failed; the conversation is intact; retry
│   └── NotPersisting              503 not_persisting         rows could not be written to disk; answers go on
├── DeadlineExceeded               504 deadline_exceeded
└── StartupError                   exit 2                     cannot start; one line that names what and why
    ├── ModelLoadError             exit 2
    └── StoreUnusable              exit 2
"""

from __future__ import annotations

from typing import ClassVar


class OnecopyError(Exception):
    """Root of the tree: `str(error)` is the sentence a user reads."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    retry: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after = retry_after

    @property
    def message(self) -> str:
        return str(self.args[0])


class RestartIntensityExceeded(OnecopyError):
    """A supervisor gave up: too many restarts within its window. `__cause__` is the last crash."""


class BadRequest(OnecopyError):
    status = 400
    code = "invalid_request"


class ContextLengthExceeded(BadRequest):
    """The prompt has more tokens than the served context. Carries both counts."""

    code = "context_length_exceeded"

    def __init__(self, tokens: int, limit: int, *, param: str | None = "messages") -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens, but the prompt has {tokens} tokens.", param=param
        )
        self.tokens = tokens
        self.limit = limit


class Unsupported(BadRequest):
    code = "unsupported"


class Unauthorized(OnecopyError):
    status = 401
    code = "invalid_api_key"


class Forbidden(OnecopyError):
    status = 403
    code = "forbidden"


class NotFound(OnecopyError):
    status = 404
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(OnecopyError):
    status = 405
    code = "method_not_allowed"


class Conflict(OnecopyError):
    status = 409
    code = "conflict"


class TooLarge(OnecopyError):
    status = 413
    code = "request_too_large"


class Overloaded(OnecopyError):
    status = 429
    code = "overloaded"
    retry = True


class InsufficientMemory(OnecopyError):
    """The bank refused, and nothing changed.

    needed, available: bytes. holders: how many conversations keep rows that cannot be reclaimed now.
    largest_prompt: tokens of the largest prompt that would fit at this moment.
    """

    status = 503
    code = "insufficient_memory"
    retry = True

    def __init__(
        self, *, needed: int, available: int, holders: int, largest_prompt: int, retry_after: float = 5.0
    ) -> None:
        super().__init__(
            f"Not enough memory for this request: it needs {needed} bytes, {available} are available and "
            f"{holders} running conversations hold the rest. The largest prompt that fits now has "
            f"{largest_prompt} tokens.",
            retry_after=retry_after,
        )
        self.needed = needed
        self.available = available
        self.holders = holders
        self.largest_prompt = largest_prompt


class Unavailable(OnecopyError):
    status = 503
    code = "unavailable"
    retry = True


class ActorStopped(Unavailable):
    code = "actor_stopped"


class LaneCrashed(Unavailable):
    code = "lane_crashed"


class NotPersisting(Unavailable):
    """Rows could not be written to disk. lasting: trying again soon cannot help."""

    code = "not_persisting"

    def __init__(self, message: str, *, lasting: bool = False) -> None:
        super().__init__(message)
        self.lasting = lasting


class DeadlineExceeded(OnecopyError):
    status = 504
    code = "deadline_exceeded"
    retry = True


class StartupError(OnecopyError):
    """The process cannot start. The command line prints the message and exits with `exit_code`."""

    exit_code: ClassVar[int] = 2
    code = "startup_error"


class ModelLoadError(StartupError):
    code = "model_load_error"


class StoreUnusable(StartupError):
    code = "store_unusable"
