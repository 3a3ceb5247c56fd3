"""Approvals on the mesh, as Istos nodes know them: one key lists what waits for a human, one takes decisions.

Who asks and what may be decided is somebody else's business (`ApprovalDesk`); here are the keys, the words on the wire, and the rule that
an owner who may not answer any more stays silent.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import zenoh

from orchestration.core.approval import Approval, ApprovalState
from orchestration.core.errors import ArgumentsInvalid, Forbidden, Invalid, NotFound, StoreUnavailable, TurnmillError
from orchestration.core.principal import Principal
from orchestration.mesh import strict_json, wire
from orchestration.mesh.manifest import service_chunk
from orchestration.mesh.session import Declaration, MeshSession

log = logging.getLogger(__name__)

#: Under this key each service that asks humans has one of its own.
APPROVALS = ".istos/approvals"

#: Requests that one answer lists at most, the oldest, and their bytes; a peer that decides them sees the others next.
MAX_LISTED, MAX_LISTED_BYTES = 20_000, 32 * 1024 * 1024

#: Queries that may wait to be answered; further ones are told to come again.
MAX_WAITING = 256

#: What counts as a yes. Anything else denies, since the yes is the dangerous direction.
YES = frozenset({"true", "1", "yes", "y"})

#: States as Istos knows them; it has fewer.
_STATES = {ApprovalState.HELD: "expired", ApprovalState.CANCELLED: "expired"}


class ApprovalDesk(Protocol):
    """What the keys need from outside. Every method may be called from several threads."""

    def who(self, token: str) -> Principal | None:
        """Whose token this is, or who may ask without one; None for nobody."""
        ...

    def pending(self, principal: Principal) -> Iterable[Approval]:
        """What waits for a human and `principal` may read, oldest first and read as it is taken; nothing where it may read none."""
        ...

    def decide(self, principal: Principal, approval_id: str, approved: bool, arguments: dict[str, Any] | None, note: str) -> Approval:
        """Decide, and return the approval as it stands then, also where somebody else was faster or there is nothing to decide any more.

        Raises:
            NotFound: there is no such approval of the principal's tenant.
            Forbidden, ArgumentsInvalid, ArgumentsDiffer: nothing was decided.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Query:
    """One query, read off Zenoh at once."""

    query: zenoh.Query
    parameters: str
    attachment: bytes | None


class ApprovalKeys:
    """The two keys of this process, from `serve` to `withdraw`; both may be called any number of times.

    Args:
        service: the deployment's name, `node` this process's: together they make the key.
        may_answer: whether this process still is the one that answers; asked for each query.
    """

    def __init__(self, session: MeshSession, service: str, node: str, desk: ApprovalDesk, may_answer: Callable[[], bool]) -> None:
        self.key = f"{APPROVALS}/{service_chunk(service)}-{node}"
        self._session = session
        self._service = service
        self._desk = desk
        self._may_answer = may_answer
        self._declared: list[Declaration] = []
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="mesh-approvals")
        self._room = threading.Semaphore(MAX_WAITING)

    @property
    def serving(self) -> bool:
        """Whether the keys are declared."""
        return bool(self._declared)

    def serve(self) -> None:
        """Declare the keys."""
        if not self._declared:
            self._declared = [self._declare(self.key, self._listed), self._declare(f"{self.key}/decide", self._decided)]

    def withdraw(self) -> None:
        """Take the keys back."""
        for declaration in self._declared:
            declaration.undeclare()
        self._declared = []

    def close(self) -> None:
        """Take the keys back for good."""
        self.withdraw()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _declare(self, key: str, answer: Callable[[_Query], bytes]) -> Declaration:
        def on_query(query: zenoh.Query) -> None:
            attachment = query.attachment.to_bytes() if query.attachment is not None else None
            asked = _Query(query, str(query.parameters), attachment)
            if not self._room.acquire(blocking=False):
                self._reply(asked, key, wire.encode_error("rate_limit_exceeded", "too many queries wait; nothing was decided"))
                return
            try:
                self._pool.submit(self._answer, asked, key, answer)
            except RuntimeError:  # the pool has been shut down
                self._room.release()

        callback = zenoh.handlers.Callback(on_query, indirect=False)
        return self._session.declare(lambda session: session.declare_queryable(key, callback, complete=True))

    def _answer(self, asked: _Query, key: str, answer: Callable[[_Query], bytes]) -> None:
        try:
            self._reply(asked, key, answer(asked))
        except StoreUnavailable:
            self._reply(asked, key, wire.encode_error("store_unavailable", "the store does not answer; nothing was decided"))
        except TurnmillError as error:
            details = error.errors if isinstance(error, Invalid) else None
            code = "validation_error" if isinstance(error, ArgumentsInvalid) else error.code
            self._reply(asked, key, wire.encode_error(code, str(error), details=details))
        except Exception as error:
            log.error("a query of %s could not be answered: %s", key, type(error).__name__)
            self._reply(asked, key, wire.encode_error("internal_error", "Internal error"))
        finally:
            self._room.release()

    def _reply(self, asked: _Query, key: str, payload: bytes) -> None:
        try:
            with asked.query:
                asked.query.reply(key, payload, encoding=zenoh.Encoding.APPLICATION_JSON)
        except zenoh.ZError as error:
            log.debug("an answer of %s found nobody: %s", key, type(error).__name__)

    def _listed(self, asked: _Query) -> bytes:
        principal = self._principal(asked)
        found = self._desk.pending(principal) if principal is not None and self._may_answer() else ()
        pending: list[bytes] = []
        size = 0
        for approval in islice(found, MAX_LISTED):
            one = wire.encode_result(as_istos(approval))
            size += len(one)
            if size > MAX_LISTED_BYTES:
                log.warning("the list of what waits is longer than one answer may be; the oldest %d are shown", len(pending))
                break
            pending.append(one)
        return b'{"service":%b,"pending":[%b]}' % (wire.encode_result(self._service), b",".join(pending))

    def _decided(self, asked: _Query) -> bytes:
        principal = self._principal(asked)
        parameters = wire.decode_parameters(asked.parameters)
        request_id = parameters.get("request_id", "")
        # Whoever asks every node must not stumble over us: what is not ours to decide matches nothing.
        if principal is None or not self._may_answer():
            return wire.encode_result({"matched": False})
        approved = parameters.get("approved", "").strip().lower() in YES
        arguments = _arguments(parameters.get("arguments", "")) if approved else None
        try:
            approval = self._desk.decide(principal, request_id, approved, arguments, _given(parameters.get("note", "")))
        except NotFound:
            return wire.encode_result({"matched": False})
        except Forbidden as error:
            return wire.encode_error("forbidden", str(error))
        return wire.encode_result({"matched": True, "request": as_istos(approval)})

    def _principal(self, asked: _Query) -> Principal | None:
        try:
            token = wire.decode_attachment(asked.attachment).token
        except ValueError:
            return None
        return self._desk.who(token)


def as_istos(approval: Approval) -> dict[str, Any]:
    """An approval as an Istos node reads it; times are epoch seconds, 0 for none."""
    approved = approval.state is ApprovalState.APPROVED and approval.approved_arguments is not None
    return {
        "id": approval.approval_id,
        "tool": approval.tool,
        "arguments": approval.approved_arguments if approved else approval.arguments,
        "prefix": approval.prefix,
        "state": _STATES.get(approval.state, str(approval.state)),
        "requested_at": approval.requested_at / 1000,
        "expires_at": approval.expires_at / 1000,
        "reason": approval.gate.reason or None,
        "requester": approval.agent,
        "conversation_id": approval.conversation_id,
        "decided_by": approval.decided_by or None,
        "decided_at": approval.decided_at / 1000,
        "note": approval.note or None,
    }


def _given(text: str) -> str:
    """A parameter's text; Istos sends `None` for what is not set."""
    return "" if text == "None" else text


def _arguments(text: str) -> dict[str, Any] | None:
    if not _given(text):
        return None
    try:
        value = strict_json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ArgumentsInvalid(
            "the edited arguments are no JSON object; nothing is decided", [{"loc": ["arguments"], "msg": "a JSON object"}]
        )
    return value
