"""Which tool calls ran on our hosts, in Redis: what keeps a repeated query from a second effect, shared by all replicas.

A record says who runs a call; whether that host still lives is one lease for all its calls, renewed by a thread here. The
rules of a repeat are in `orchestration/mesh/hosting/`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import threading

from orchestration.core.errors import StoreUnavailable
from orchestration.core.tool_record import Claim, ClaimState, RecordKey
from orchestration.state.store import Store, translated

log = logging.getLogger(__name__)

#: How long a record is kept after it was made or answered, in seconds: as long as idempotency keys of turns.
KEPT_S = 86_400

#: Longer answers are not kept, in characters; a repeat then learns only that the call ran.
MAX_ANSWER_CHARS = 1_048_576

#: Stands for an answer that was too long to keep.
_TOO_LONG = "-"


class RedisToolRecords:
    """The records of one tool host on one Redis. Safe for threads; the port is `core.tool_record.ToolRecords`.

    A fork gets an identity of its own with its first claim.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lease_s = store.settings.lease_s
        self._lock = threading.Lock()
        self._pid = 0
        self._host = ""
        self._nonces: dict[str, str] = {}
        self._unfinished: dict[str, tuple[RecordKey, str]] = {}
        self._doubtful: list[tuple[str, str]] = []  # claims that the store may hold although nothing runs
        self._stop = threading.Event()

    def claim(self, call: RecordKey, *, may_start: bool = True) -> Claim:
        """Claim `call` for this host, or learn what became of it, in one round trip; with `may_start=False` only look.

        Raises:
            StoreUnavailable: whether it was claimed is unknown; nothing ran.
        """
        self._ensure_host()
        record, nonce = _record(call), secrets.token_hex(8)
        lease_ms = int(self._lease_s * 1000)
        try:
            state, answer = self._store.run("tool_claim", record, self._host, nonce, call.arguments_hash, int(may_start), lease_ms, KEPT_S)
        except StoreUnavailable:
            with self._lock:
                self._doubtful.append((record, nonce))
            raise
        claim = _claim(state, answer)
        if claim.state is ClaimState.STARTED:
            with self._lock:
                self._nonces[record] = nonce
        return claim

    def finish(self, call: RecordKey, answer: str) -> None:
        """Record the answer of a call that this host claimed; the first answer stays. A store that is away is asked again.

        Raises:
            StoreUnavailable: not yet recorded; a repeat keeps waiting for it.
        """
        record = _record(call)
        kept = answer if len(answer) <= MAX_ANSWER_CHARS else _TOO_LONG
        try:
            self._store.run("tool_finish", record, "done", self._nonces.get(record, ""), kept, call.arguments_hash, KEPT_S)
        except StoreUnavailable:
            with self._lock:
                self._unfinished[record] = (call, answer)
            raise
        with self._lock:
            self._nonces.pop(record, None)
            self._unfinished.pop(record, None)

    def release(self, call: RecordKey) -> None:
        """Forget a claim of this host whose call did not run, so that it may be asked again."""
        record = _record(call)
        with self._lock:
            nonce = self._nonces.pop(record, "")
        try:
            self._store.run("tool_finish", record, "release", nonce, "", "", KEPT_S)
        except StoreUnavailable:
            with self._lock:
                self._doubtful.append((record, nonce))
            raise

    def look(self, calls: list[RecordKey]) -> list[Claim]:
        """What became of each of `calls`, in one round trip."""
        return [_claim(state, answer) for state, answer in self._store.run("tool_look", *[_record(call) for call in calls])]

    def close(self) -> None:
        """Stop renewing this host's lease; what it still runs counts as unknown from then on."""
        self._stop.set()

    def _ensure_host(self) -> None:
        if self._pid == os.getpid():
            return
        with self._lock:
            if self._pid == os.getpid():
                return
            self._host = secrets.token_hex(8)
            self._nonces, self._unfinished, self._doubtful, self._stop = {}, {}, [], threading.Event()
            self._pid = os.getpid()
            threading.Thread(target=self._renew, args=(self._stop,), name="tool-records", daemon=True).start()

    def _renew(self, stop: threading.Event) -> None:
        while not stop.wait(self._lease_s / 4):
            with self._lock:
                unfinished, doubtful, running = list(self._unfinished.values()), list(self._doubtful), bool(self._nonces)
            if not running and not doubtful:
                continue
            try:
                with translated():
                    self._store.client.set(f"tm:idem:host:{self._host}", "1", px=int(self._lease_s * 1000))
                for call, answer in unfinished:
                    self.finish(call, answer)
                for record, nonce in doubtful:
                    self._store.run("tool_finish", record, "release", nonce, "", "", KEPT_S)
                    self._doubtful.remove((record, nonce))
            except Exception as error:  # whatever it was, the lease must be tried again
                log.warning("tool records are not renewed: %s", error)


def _record(call: RecordKey) -> str:
    names = json.dumps([call.tenant, call.tool, call.key]).encode()
    return f"tm:idem:{hashlib.sha256(names).hexdigest()[:40]}"


def _claim(state: str, answer: str) -> Claim:
    if state == ClaimState.DONE and answer == _TOO_LONG:
        return Claim(ClaimState.UNKNOWN)
    return Claim(ClaimState(state), answer)
