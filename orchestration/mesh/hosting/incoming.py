"""One query as it reached a host: what it carries, read off Zenoh at once, and its one reply."""

from __future__ import annotations

import hashlib
import logging
import threading
import uuid
from typing import Any

import zenoh
from pydantic import ValidationError

from orchestration.core.errors import Unauthorized
from orchestration.core.tool import Tool
from orchestration.core.tool_record import RecordKey
from orchestration.identity.tokens import TokenVerifier
from orchestration.mesh import strict_json, wire
from orchestration.mesh.hosting import answers, arguments
from orchestration.mesh.hosting.answers import Answer
from orchestration.mesh.tokens import Asker, verify

log = logging.getLogger(__name__)


class Refused(Exception):
    """The query is answered with an error and nothing runs."""

    def __init__(self, answer: Answer) -> None:
        super().__init__("refused")
        self.answer = answer


class Incoming:
    """A query of one tool. `reply` or `drop` ends it, whichever comes first; until then its caller waits."""

    def __init__(self, tool: Tool[..., Any], query: zenoh.Query) -> None:
        self.tool = tool
        self._query: zenoh.Query | None = query
        self._lock = threading.Lock()
        self._key = str(query.key_expr)
        self._parameters = str(query.parameters)
        self._payload = query.payload.to_bytes() if query.payload is not None else b""
        self._attached = query.attachment.to_bytes() if query.attachment is not None else None
        self.attachment = wire.Attachment()
        self.correlation_id = ""
        self.asker = Asker()
        self.arguments: dict[str, Any] = {}
        self.record: RecordKey | None = None

    def read(self, secret: str, callers: TokenVerifier | None = None) -> None:
        """Find out who asks for what; with an empty `secret` anybody may. `callers` knows the tokens of callers, where those are taken too.

        Raises:
            Refused: it cannot be read, its caller may not ask, or its arguments do not fit.
        """
        prefix = self.tool.spec.prefix
        try:
            self.attachment = wire.decode_attachment(self._attached)
        except ValueError as error:
            raise self.refused("bad_request", f"the attachment cannot be used: {error}") from None
        finally:
            self.correlation_id = self.attachment.cid or str(uuid.uuid4())
        if self._key != prefix:
            # Every owner that a wildcard meets would act on it.
            raise self.refused("bad_request", f"{prefix!r} is asked by its own key only")
        if secret:
            try:
                self.asker = verify(self.attachment.token, prefix, secret=secret, callers=callers)
            except Unauthorized as error:
                log.info("a query of %s was refused: %s", prefix, error)
                raise self.refused("unauthorized", f"Not authorized for {prefix!r}") from None
        try:
            given = (
                arguments.from_payload(self._payload)
                if self._payload
                else arguments.from_texts(wire.decode_parameters(self._parameters), self.tool.spec.parameters)
            )
        except ValueError as error:
            raise self.refused("bad_request", f"the arguments cannot be read: {error}") from None
        try:
            self.arguments = self.tool.validate(given)
        except ValidationError as error:
            raise Refused(answers.of_invalid(error, correlation_id=self.correlation_id)) from None
        except Exception as error:
            log.error("the arguments of %s could not be checked: %s", prefix, answers.where(error))
            raise self.refused("internal_error", "Internal error") from None
        if self.attachment.idem:
            digest = hashlib.sha256(strict_json.dumps(_sorted(given)).encode()).hexdigest()[:32]
            self.record = RecordKey(self.asker.tenant, prefix, self.attachment.idem, digest)

    def refused(self, code: str, message: str) -> Refused:
        """The refusal to raise."""
        return Refused(answers.of_error(code, message, correlation_id=self.correlation_id))

    def reply(self, answer: Answer) -> None:
        """Answer the query; the first answer counts, and nobody may be waiting any more."""
        query = self._take()
        if query is None:
            return
        try:
            with query:
                query.reply(self.tool.spec.prefix, answer.payload, encoding=answer.encoding)
        except zenoh.ZError as error:
            log.debug("an answer of %s found nobody: %s", self.tool.spec.prefix, type(error).__name__)

    def drop(self) -> None:
        """End the query without an answer: what came of it is unknown to its caller."""
        query = self._take()
        if query is not None:
            query.drop()  # type: ignore[no-untyped-call]

    def _take(self) -> zenoh.Query | None:
        with self._lock:
            query, self._query = self._query, None
        return query


def _sorted(value: Any) -> Any:
    """The same arguments in another order are the same call."""
    if isinstance(value, dict):
        return {name: _sorted(value[name]) for name in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value
