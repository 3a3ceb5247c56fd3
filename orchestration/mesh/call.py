"""Asking one tool once: the query, its first reply, and what is known when none came. Never raises for what the mesh did."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import zenoh

from orchestration.core.errors import MeshUnavailable, Misconfigured
from orchestration.core.tool import Outcome, ToolAnswer, ToolQuery
from orchestration.mesh import strict_json, wire
from orchestration.mesh.session import MeshSession, barrier
from orchestration.mesh.tokens import Asker, sign
from orchestration.settings import Settings

log = logging.getLogger(__name__)

#: Keys whose owners are watched at a time; the least recently asked is let go.
MAX_WATCHED_KEYS = 512

#: A key that was served this long ago, in seconds, may be served again in a moment: its host, or the hub, is restarting.
LATELY_S = 10.0

#: For how long a call of such a key is asked again, and the pause before each time, in seconds.
COMES_BACK_S, LOOK_AGAIN_S = 3.0, 0.1


class ToolCaller:
    """Asks tools on the process's session. Safe for threads.

    Args:
        serves_here: whether a tool is served by this session; such a one is asked within it alone, since Zenoh would ask one owner
            here and another one behind the hub.
        heard_lately: whether somebody said a moment ago that he serves a key.
    """

    def __init__(
        self,
        session: MeshSession,
        settings: Settings,
        serves_here: Callable[[str], bool] = lambda prefix: False,
        *,
        heard_lately: Callable[[str], bool] = lambda prefix: False,
    ) -> None:
        self._session = session
        self._serves_here = serves_here
        self._heard_lately = heard_lately
        self._secret = settings.mesh_secret.get_secret_value()
        self._owners = _Owners()

    def ask(self, query: ToolQuery) -> ToolAnswer:
        """Ask the tool of `query` once and wait for its first reply, at most `query.timeout_s` seconds.

        Codes of its own: `bad_request` (no plain key, or arguments that cannot be sent; refused for good), `mesh_unavailable`,
        `expired` and `not_found` (it did not run), `timeout` and `no_reply` (it may have run), `bad_reply` (it ran).

        Where nobody serves the key nothing ran. If somebody did a moment ago, or the hub was reached only a moment ago, it is
        asked again for a few seconds before that is believed.
        """
        until = time.monotonic() + min(COMES_BACK_S, query.timeout_s)
        while True:
            answer = self._ask(query)
            if answer.code != "not_found" or answer.outcome is not Outcome.NOT_RUN or not self._comes_back(query, until):
                return answer
            time.sleep(LOOK_AGAIN_S)

    def _comes_back(self, query: ToolQuery, until: float) -> bool:
        """Whether it is worth while to ask once more, before `until` (monotonic seconds), for a key that nobody serves now."""
        if time.monotonic() + LOOK_AGAIN_S >= until:
            return False
        if query.expires_ms and (time.time() + LOOK_AGAIN_S) * 1000 >= query.expires_ms:
            return False
        return self._session.settling or self._owners.served_lately(query.prefix) or self._heard_lately(query.prefix)

    def _ask(self, query: ToolQuery) -> ToolAnswer:
        if not wire.is_tool_key(query.prefix):
            return ToolAnswer(Outcome.FAILED, code="bad_request", message="not asked: the tool's key is no plain key outside .istos/")
        now_ms = int(time.time() * 1000)
        if query.expires_ms and now_ms >= query.expires_ms:
            return ToolAnswer(Outcome.NOT_RUN, code="expired", message=f"{query.prefix} was not asked: its time was up")
        try:
            parts = self._parts(query, now_ms)
        except ValueError as error:
            return ToolAnswer(Outcome.FAILED, code="bad_request", message=f"the arguments cannot be sent: {error}")
        try:
            session = self._session.opened(query.timeout_s)
        except (MeshUnavailable, Misconfigured) as error:
            return ToolAnswer(Outcome.NOT_RUN, code="mesh_unavailable", message=f"{query.prefix} was not asked: {error}")
        here = self._serves_here(query.prefix)
        try:
            owner = None if here else self._owners.watch(session, query.prefix)
        except zenoh.ZError:
            return ToolAnswer(Outcome.NOT_RUN, code="mesh_unavailable", message=f"{query.prefix} was not asked: the mesh session has ended")
        asked_at = time.monotonic()
        served = owner is None or owner.served_since(asked_at)
        try:
            reply = _first_reply(session, query, parts, zenoh.Locality.SESSION_LOCAL if here else zenoh.Locality.ANY)
        except zenoh.ZError as error:
            # Nothing tells how far it came.
            log.warning("the query of %s failed: %s", query.prefix, type(error).__name__)
            return ToolAnswer(Outcome.UNKNOWN, code="no_reply", message=f"asking {query.prefix} failed; whether it ran is unknown")
        if reply is not None:
            return _read(reply, query)
        if served or (owner is not None and owner.served_since(asked_at)):
            return ToolAnswer(
                Outcome.UNKNOWN, code="no_reply", message=f"{query.prefix} took the call and answered nothing; what it did is unknown"
            )
        if not self._session.connected:
            return ToolAnswer(Outcome.NOT_RUN, code="mesh_unavailable", message=f"{query.prefix} was not reached: the mesh is away")
        return ToolAnswer(Outcome.NOT_RUN, code="not_found", message=f"nobody serves {query.prefix}; it did not run")

    def close(self) -> None:
        """Let go of what is watched."""
        self._owners.clear()

    def _parts(self, query: ToolQuery, now_ms: int) -> dict[str, Any]:
        token = query.forwarded_token
        if not token and self._secret:
            token = sign(Asker(query.sub, query.tenant, query.roles), query.prefix, secret=self._secret, now_s=now_ms / 1000)
        attachment = wire.Attachment(
            token=token,
            cid=query.call_id,
            traceparent=query.traceparent,
            idem=query.call_id,
            exp=query.expires_ms or now_ms + int(query.timeout_s * 1000),
        )
        parts: dict[str, Any] = {"selector": query.prefix, "attachment": wire.encode_attachment(attachment)}
        if query.payload:
            parts["payload"] = strict_json.dumps(query.arguments).encode()
            parts["encoding"] = zenoh.Encoding.APPLICATION_JSON
        elif parameters := wire.encode_parameters(query.arguments):
            parts["selector"] = f"{query.prefix}?{parameters}"
        return parts


def _first_reply(session: zenoh.Session, query: ToolQuery, parts: dict[str, Any], destination: zenoh.Locality) -> zenoh.Reply | None:
    stop = zenoh.CancellationToken()
    replies = session.get(
        consolidation=zenoh.ConsolidationMode.NONE,
        allowed_destination=destination,
        timeout=max(query.timeout_s, 0.001),
        cancellation_token=stop,
        **parts,
    )
    try:
        reply: zenoh.Reply = replies.recv()
        return reply
    except zenoh.ZError:  # ended without one
        return None
    finally:
        del replies
        stop.cancel()  # type: ignore[no-untyped-call]


def _read(reply: zenoh.Reply, query: ToolQuery) -> ToolAnswer:
    if reply.ok is not None:
        return wire.decode_reply(reply.ok.payload.to_bytes(), str(reply.ok.encoding))
    text = reply.err.payload.to_bytes().decode("utf-8", "replace") if reply.err is not None else ""
    if text.strip('"') == "Timeout":
        return ToolAnswer(
            Outcome.UNKNOWN, code="timeout", message=f"{query.prefix} did not answer in {query.timeout_s:g} s; whether it ran is unknown"
        )
    return ToolAnswer(Outcome.FAILED, code="tool_error", message=f"{query.prefix} answered with an error: {text[:1000]}")


class _Owner:
    """Whether somebody serves one key. Zenoh tells of changes, and answers for the present."""

    def __init__(self, session: zenoh.Session, key: str) -> None:
        self._left_at = 0.0
        self._querier: Any = session.declare_querier(key)  # the stubs have its status wrong
        self._listener = self._querier.declare_matching_listener(zenoh.handlers.Callback(self._changed, indirect=False))

    def _changed(self, status: Any) -> None:
        # Both kinds count: who has just left was there a moment ago, with the call perhaps in hand.
        self._left_at = time.monotonic()

    def served_since(self, moment: float) -> bool:
        """Whether the key is served, or was at some time since `moment` (monotonic seconds)."""
        return bool(self._querier.matching_status.matching) or self._left_at >= moment

    def served_lately(self) -> bool:
        """Whether it was served at some time within the last `LATELY_S` seconds."""
        return self.served_since(time.monotonic() - LATELY_S)

    def close(self) -> None:
        self._listener.undeclare()  # type: ignore[no-untyped-call]
        self._querier.undeclare()


class _Owners:
    """The watched keys. A key asked for the first time costs one more round trip, after which its status is known for sure."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._session: zenoh.Session | None = None
        self._watched: OrderedDict[str, _Owner] = OrderedDict()

    def watch(self, session: zenoh.Session, key: str) -> _Owner:
        let_go: list[_Owner] = []
        with self._lock:
            if self._session is not session:  # the first one, or its parent's in a forked child
                self._session, self._watched = session, OrderedDict()
            known = self._watched.get(key)
            if known is not None:
                self._watched.move_to_end(key)
                return known
        owner = _Owner(session, key)
        barrier(session)
        with self._lock:
            if self._session is session:
                known = self._watched.setdefault(key, owner)
                if known is not owner:
                    let_go.append(owner)
                while len(self._watched) > MAX_WATCHED_KEYS:
                    let_go.append(self._watched.popitem(last=False)[1])
                owner = known
        for one in let_go:
            one.close()
        return owner

    def served_lately(self, key: str) -> bool:
        with self._lock:
            owner = self._watched.get(key)
        return owner is not None and owner.served_lately()

    def clear(self) -> None:
        with self._lock:
            watched, self._watched = list(self._watched.values()), OrderedDict()
        for one in watched:
            try:
                one.close()
            except zenoh.ZError:
                return
