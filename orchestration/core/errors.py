"""The one error tree of Turnmill: what can be wrong, each kind with a stable `code`.

It knows no transport; `gateway/problems.py` and `mesh/wire.py` each translate it once. A message names the thing and what
did (not) happen; it never carries arguments, prompts or tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar


class TurnmillError(Exception):
    """Something that a caller may have to handle; `code` says what kind."""

    code: ClassVar[str] = "error"


class Invalid(TurnmillError):
    """What was sent does not fit; nothing changed. `errors` says where: a list of `{"loc": [...], "msg": "..."}`."""

    code = "validation_error"

    def __init__(self, message: str, errors: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(message)
        self.errors = list(errors)


class BadRequest(TurnmillError):
    """What was sent could not be read at all; nothing changed."""

    code = "bad_request"


class BadEventId(TurnmillError):
    """A `Last-Event-ID` that is no positive integer."""

    code = "bad_event_id"


class NotFound(TurnmillError):
    """There is no such thing, or it belongs to another tenant; the two look the same."""

    code = "not_found"


class UnknownAgent(NotFound):
    """No agent of this name is declared in the agents' module."""

    code = "unknown_agent"


class Unauthorized(TurnmillError):
    """Nobody known is asking: no token, or one that does not hold."""

    code = "unauthorized"


class BadSignature(Unauthorized):
    """A webhook's signature is missing, wrong or too old; nothing was queued."""

    code = "bad_signature"


class Forbidden(TurnmillError):
    """Whoever asks is known, but may not do this."""

    code = "forbidden"


class TooLarge(TurnmillError):
    """More was sent than is taken; nothing changed."""

    code = "too_large"


class RateLimited(TurnmillError):
    """Too much at once; `retry_after_s` says when to try again, in seconds."""

    code = "rate_limited"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class MailboxFull(RateLimited):
    """The conversation, or the tenant, has as many waiting turns as it may have."""

    code = "mailbox_full"


class StoreUnavailable(TurnmillError):
    """State or broker could not take a write; nothing was stored. Trying again later may help."""

    code = "store_unavailable"
    retry_after_s: float = 2.0


class ConversationBusy(TurnmillError):
    """A turn of this conversation runs, and the submission asked to be rejected then."""

    code = "conversation_busy"


class IdempotencyMismatch(TurnmillError):
    """The same idempotency key was used within 24 h with another body."""

    code = "idempotency_mismatch"


class TurnEnded(TurnmillError):
    """The turn has ended; its end is final."""

    code = "turn_ended"


class CallEnded(TurnmillError):
    """The tool call has ended; its end is final."""

    code = "call_ended"


class AlreadyDecided(TurnmillError):
    """Somebody decided otherwise before; `approval` is the settled approval as a JSON object."""

    code = "already_decided"

    def __init__(self, message: str, approval: dict[str, Any]) -> None:
        super().__init__(message)
        self.approval = approval


class ApprovalExpired(TurnmillError):
    """Nobody decided in time. The tool call did not run and will not."""

    code = "approval_expired"


class ApprovalCancelled(TurnmillError):
    """The turn or the call was cancelled before anybody decided. The tool call did not run and will not."""

    code = "approval_cancelled"


class ArgumentsInvalid(Invalid):
    """The edited arguments break the tool's schema; nothing is decided."""

    code = "arguments_invalid"


class ArgumentsDiffer(TurnmillError):
    """A quorum must approve the same arguments; this decision carries others. It was not counted."""

    code = "arguments_differ"


class NotHeld(TurnmillError):
    """Only a held approval can be reopened."""

    code = "not_held"


class Misconfigured(TurnmillError):
    """A setting or a declaration that cannot work; refused at start, naming it."""

    code = "misconfigured"


class CatalogueError(Misconfigured):
    """Two tools would be one name to the model, or a gated tool has nowhere to ask; names them."""

    code = "catalogue_error"


class ModelError(TurnmillError):
    """The model's server failed. `kind` is one of the values of `ModelFault`; `retryable` says whether asking again may help.

    `retry_after_s` is the pause that the server asked for, in seconds, if it did.
    """

    code = "model_error"

    def __init__(self, kind: str, message: str, *, retryable: bool, retry_after_s: float | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.retryable = retryable
        self.retry_after_s = retry_after_s
        self.status = status


class ModelBusy(ModelError):
    """The limits set for a model leave no room now; it was not asked. `retry_after_s` says when there may be room."""

    code = "model_busy"


class CompactionError(TurnmillError):
    """A compactor returned what cannot be sent: no messages, or a call without its result. The model was not asked."""

    code = "compaction_error"


class StepLost(TurnmillError):
    """A step was begun many times and never finished: whatever runs it dies of it."""

    code = "step_lost"


class MeshUnavailable(TurnmillError):
    """There is no connection to the mesh, or it does not answer. Nothing was asked and nothing ran."""

    code = "mesh_unavailable"


class Fenced(TurnmillError):
    """The step was passed on to somebody else, or its turn has ended: stop, and change nothing."""

    code = "fenced"
