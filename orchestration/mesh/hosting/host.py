"""A tool host: declares tools and their manifest, admits queries, and sees to it that a repeated one has no second effect.

Reading a query is `incoming.py`, running a function `running.py`, what was run before `core/tool_record.py`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zenoh

from orchestration.core.errors import Misconfigured, StoreUnavailable
from orchestration.core.tool import Tool
from orchestration.core.tool_record import Claim, ClaimState, ToolRecords
from orchestration.mesh.hosting import answers
from orchestration.mesh.hosting.answers import Answer
from orchestration.mesh.hosting.incoming import Incoming, Refused
from orchestration.mesh.hosting.repeats import Repeats, Waiting
from orchestration.mesh.hosting.running import Runner
from orchestration.mesh.manifest import encode_manifest, manifest_key
from orchestration.mesh.session import Declaration, MeshSession
from orchestration.mesh.tokens import callers_of
from orchestration.settings import Settings

log = logging.getLogger(__name__)

#: Threads for sync tools, and for what surrounds async ones.
THREADS = 32

#: Calls that a host has in hand at a time; further ones are told to ask again.
MAX_CALLS = 1024

#: How long a repeat without an expiry waits for the answer of the first, in seconds.
REPEAT_S = 60.0

#: For how long a stopping host with nothing in hand refuses what is still on its way to it, in seconds.
LINGER_S = 0.3


class ToolHost:
    """Serves `tools` on `session` from `start` to `close`. Queries run concurrently; Zenoh's own threads are never held.

    Without `records` it cannot tell a repeat from a new call, and announces no tool as idempotent. Without
    `settings.mesh_secret` it serves whoever asks, and says so once; with it, a query needs the token that Turnmill signs, or, with
    `settings.mesh_caller_tokens`, one of a caller that an agent forwards. `service` is the name in the manifest; replicas of one
    host share it, other hosts need another name where a peer asks for a manifest by name.

    Raises:
        Misconfigured: two of the tools have the same prefix; names both.
    """

    def __init__(
        self,
        settings: Settings,
        tools: Sequence[Tool[..., Any]],
        session: MeshSession,
        records: ToolRecords | None = None,
        *,
        service: str = "",
        threads: int = THREADS,
        max_calls: int = MAX_CALLS,
    ) -> None:
        self.service = service or f"{settings.service}-tools"
        self.tools = distinct(tools)
        self._prefixes = frozenset(tool.spec.prefix for tool in self.tools)
        self._secret = settings.mesh_secret.get_secret_value()
        self._callers = callers_of(settings)
        self._session = session
        self._records = records
        self._repeats = Repeats(records) if records is not None else None
        self._threads = threads
        self._max_calls = max_calls
        self._calls = 0
        self._idle = threading.Condition()
        self._closing = False
        self._pool: ThreadPoolExecutor | None = None
        self._runner = Runner()
        self._declarations: list[Declaration] = []

    def start(self) -> None:
        """Declare the tools, then the manifest; at once, or when the session opens."""
        if not self._secret:
            log.warning("%s serves without an authorizer (TURNMILL_MESH_SECRET is empty): whoever reaches the mesh may call", self.service)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="tool")
        for tool in self.tools:
            self._declarations.append(self._declare(tool.spec.prefix, self._receiver(tool)))
        manifest = encode_manifest(self.service, [tool.spec for tool in self.tools], records=self._records is not None)
        key = manifest_key(self.service)

        def tell(query: zenoh.Query) -> None:
            with query:
                query.reply(key, manifest, encoding=zenoh.Encoding.APPLICATION_JSON)

        self._declarations.append(self._declare(key, tell))

    def serves(self, prefix: str) -> bool:
        """Whether this host takes calls of the tool at `prefix` now."""
        return bool(self._declarations) and not self._closing and prefix in self._prefixes

    def close(self, drain_s: float = 0.0) -> bool:
        """Take no more calls, wait at most `drain_s` seconds for those in hand, then stop; whether all had ended.

        The calls that are left get no answer, and their records will say that their outcome is unknown.
        """
        with self._idle:
            self._closing = True
        # What is on its way here, or comes while no replica is left, must read that nothing ran. So somebody refuses it from
        # before the tools are taken back. Those who are declared after that make a router look for the other replicas: Zenoh 1.10
        # keeps a route to a queryable that was undeclared until another one of its key is declared.
        refusing = [self._declare(tool.spec.prefix, self._refuser(tool), complete=False) for tool in self.tools]
        for declaration in reversed(self._declarations):
            declaration.undeclare()
        self._declarations.clear()
        refusing += [self._declare(tool.spec.prefix, self._refuser(tool), complete=False) for tool in self.tools]
        gone = time.monotonic() + min(drain_s, LINGER_S)
        with self._idle:
            ended = self._idle.wait_for(lambda: self._calls == 0, drain_s)
        time.sleep(max(0.0, gone - time.monotonic()))
        for declaration in refusing:
            declaration.undeclare()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._runner.close()
        return ended

    def _declare(self, key: str, on_query: Callable[[zenoh.Query], None], *, complete: bool = True) -> Declaration:
        # Complete, so that Zenoh asks one of several replicas; direct, since the callback only reads and queues.
        callback = zenoh.handlers.Callback(on_query, indirect=False)
        return self._session.declare(lambda session: session.declare_queryable(key, callback, complete=complete))

    def _refuser(self, tool: Tool[..., Any]) -> Callable[[zenoh.Query], None]:
        def refuse(query: zenoh.Query) -> None:
            Incoming(tool, query).reply(answers.of_error("rate_limit_exceeded", "the host stops; nothing ran", correlation_id=""))

        return refuse

    def _receiver(self, tool: Tool[..., Any]) -> Callable[[zenoh.Query], None]:
        def receive(query: zenoh.Query) -> None:
            call = Incoming(tool, query)
            with self._idle:
                full = self._calls >= self._max_calls or self._closing
                if not full:
                    self._calls += 1
            if full:
                call.reply(answers.of_error("rate_limit_exceeded", "the host is busy; nothing ran", correlation_id=""))
                return
            self._queue(call)

        return receive

    def _queue(self, call: Incoming) -> None:
        try:
            assert self._pool is not None
            self._pool.submit(self._handle, call)
        except RuntimeError:  # the pool has been shut down
            self._settle(call, answers.of_error("rate_limit_exceeded", "the host stops; nothing ran", correlation_id=""))

    def _handle(self, call: Incoming) -> None:
        try:
            call.read(self._secret, self._callers)
            if self._mine(call):
                self._run(call)
        except Refused as refused:
            self._settle(call, refused.answer)
        except Exception as error:
            log.error("a query of %s could not be handled: %s", call.tool.spec.prefix, answers.where(error))
            self._settle(call, answers.of_error("internal_error", "Internal error", correlation_id=call.correlation_id))

    def _mine(self, call: Incoming) -> bool:
        """Whether `call` is to be run here and now; otherwise it waits for another's answer. Raises Refused with any other end."""
        expired = bool(call.attachment.exp) and time.time() * 1000 >= call.attachment.exp
        if call.record is None or self._records is None:
            if expired:
                raise call.refused("expired", f"{call.tool.spec.prefix} did not run: the time of the query was up")
            return True
        try:
            claim = self._records.claim(call.record, may_start=not expired)
        except StoreUnavailable:
            raise call.refused("store_unavailable", f"{call.tool.spec.prefix} did not run: its records are away") from None
        if claim.state is ClaimState.STARTED:
            return True
        if claim.state is ClaimState.RUNNING and self._repeats is not None:
            until = call.attachment.exp / 1000 - time.time() if call.attachment.exp else REPEAT_S
            self._repeats.wait(Waiting(call.record, time.monotonic() + until, lambda found: self._repeated(call, found)))
            return False
        raise Refused(_of_claim(call, claim))

    def _repeated(self, call: Incoming, claim: Claim | None) -> None:
        if claim is None:
            self._settle(call, None)
        elif claim.state is ClaimState.ABSENT:  # the first did not run after all
            self._queue(call)
        else:
            self._settle(call, _of_claim(call, claim))

    def _run(self, call: Incoming) -> None:
        def done(answer: Answer) -> None:
            if call.record is None or self._records is None:
                self._settle(call, answer)
                return
            # The caller need not wait for the record: a repeat that comes before it waits for this host, as one that came while the
            # tool ran.
            try:
                call.reply(answer)
            finally:
                self._remember(call, answer)
                self._ended()

        self._runner.run(
            call.tool,
            call.arguments,
            correlation_id=call.correlation_id,
            traceparent=call.attachment.traceparent,
            done=self._off_loop(done),
        )

    def _off_loop(self, done: Callable[[Answer], None]) -> Callable[[Answer], None]:
        """`done` writes to the store: the event loop's thread passes it on, the host's own threads just do it."""

        def pass_on(answer: Answer) -> None:
            if threading.current_thread().name != "tool-loop":
                done(answer)
                return
            try:
                assert self._pool is not None
                self._pool.submit(done, answer)
            except RuntimeError:
                log.debug("an answer came after the host had stopped")

        return pass_on

    def _remember(self, call: Incoming, answer: Answer) -> None:
        assert call.record is not None and self._records is not None
        try:
            if answer.ran:
                self._records.finish(call.record, answer.kept())
            else:
                self._records.release(call.record)
        except Exception as error:  # the caller gets the answer all the same; the records try again by themselves
            log.warning("the answer of %s (%s) is not recorded yet: %s", call.tool.spec.prefix, call.correlation_id, type(error).__name__)

    def _settle(self, call: Incoming, answer: Answer | None) -> None:
        try:
            call.drop() if answer is None else call.reply(answer)
        finally:
            self._ended()

    def _ended(self) -> None:
        with self._idle:
            self._calls -= 1
            self._idle.notify_all()


def _of_claim(call: Incoming, claim: Claim) -> Answer:
    prefix = call.tool.spec.prefix
    if claim.state is ClaimState.DONE:
        try:
            return Answer.from_kept(claim.answer)
        except ValueError:
            claim = Claim(ClaimState.UNKNOWN)
    if claim.state is ClaimState.MISMATCH:
        return call.refused("conflict", f"{prefix} did not run: its idempotency key was used with other arguments").answer
    if claim.state is ClaimState.ABSENT:
        return call.refused("expired", f"{prefix} did not run: the time of the query was up").answer
    return call.refused("unknown_outcome", f"{prefix} was asked before and may have run; its answer is lost").answer


def distinct(tools: Sequence[Tool[..., Any]]) -> tuple[Tool[..., Any], ...]:
    """`tools`, each once, by prefix.

    Raises:
        Misconfigured: two different ones have the same prefix; names both.
    """
    known: dict[str, Tool[..., Any]] = {}
    for tool in tools:
        first = known.setdefault(tool.spec.prefix, tool)
        if first is not tool:
            names = " and ".join(sorted(f"{one.__module__}.{one.__name__}" for one in (first, tool)))
            raise Misconfigured(f"two tools have the prefix {tool.spec.prefix!r}: {names}; rename one")
    return tuple(known[prefix] for prefix in sorted(known))
