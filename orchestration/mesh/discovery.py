"""Which tools the mesh has: all manifests put together, kept for a few seconds, filtered by what an agent wishes.

Reading one manifest is `manifest.py`; which calls need a human in the end is decided in the core.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import zenoh

from orchestration.core.errors import MeshUnavailable, Misconfigured
from orchestration.core.keys import matches
from orchestration.core.tool import Discover, ToolSpec
from orchestration.mesh.manifest import CAPABILITIES, Manifest, decode_manifest
from orchestration.mesh.session import MeshSession, barrier
from orchestration.settings import Settings

log = logging.getLogger(__name__)

#: How long the services have to answer, in seconds; a hung one costs each refresh that much.
ANSWER_S = 1.0

#: How long the first refresh waits for a connection, in seconds.
CONNECT_S = 2.0

#: Lists of wishes whose answer is kept until the next refresh.
_MAX_CHOSEN = 256

#: For how long a service counts as there after it was last heard, in seconds: its host, or the hub, may be restarting.
KEEP_S = 10.0

#: For how long a process that never heard the mesh properly may say so instead of answering, in seconds.
DOUBT_S = 15.0

#: For how long such a process waits for a service that was asked and does not answer, in seconds.
HUNG_S = 5.0

#: Pause before the mesh is asked again while hosts may be on their way back to it, in seconds.
LOOK_AGAIN_S = 0.1

#: Remembered complaints; beyond that they are forgotten and may be made again.
_MAX_COMPLAINTS = 10_000


@dataclass(frozen=True, slots=True)
class _Service:
    """What one service said of itself, and when it was last heard (monotonic seconds)."""

    manifests: tuple[Manifest, ...]
    heard_at: float


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of all services by name, when the mesh was last asked (monotonic seconds), and what was chosen of it so far."""

    at: float = float("-inf")
    services: dict[str, _Service] = field(default_factory=dict)
    chosen: dict[tuple[Discover, ...], tuple[ToolSpec, ...]] = field(default_factory=dict)

    def find(self, wishes: Sequence[Discover]) -> list[ToolSpec]:
        """The tools that match one of `wishes`."""
        asked = tuple(wishes)
        found = self.chosen.get(asked)
        if found is None:
            latest = max((service.heard_at for service in self.services.values()), default=0.0)
            present = [manifest for service in self.services.values() if service.heard_at >= latest for manifest in service.manifests]
            absent = [manifest for service in self.services.values() if service.heard_at < latest for manifest in service.manifests]
            found = tuple(select(present, asked, absent=absent))
            if len(self.chosen) >= _MAX_CHOSEN:
                self.chosen.clear()
            self.chosen[asked] = found
        return list(found)


class Discovery:
    """The tools of the mesh. Safe for threads: one refreshes, the others take what is known or wait for the first answer.

    A service that does not answer is not gone yet: for `KEEP_S` seconds after it was last heard its tools are still shown, and
    for as long as the mesh is away or the hub was reached only a moment ago. A call of a tool that is gone all the same is
    answered with `not_found`.
    """

    def __init__(self, session: MeshSession, settings: Settings) -> None:
        self._session = session
        self._kept_s = settings.discovery_s
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        self._known = _Known()
        self._sure = False
        self._doubted_at = 0.0
        self._complaints: set[tuple[str, str, str]] = set()

    def discover(self, wishes: Sequence[Discover], *, sure: bool = False) -> list[ToolSpec]:
        """The tools that match one of `wishes`, by prefix. While the mesh is away, those that were known last.

        Raises:
            MeshUnavailable: `sure` was wanted, and this process has not heard all that is there yet; not for longer than `DOUBT_S`.
        """
        if not wishes:
            return []
        known = self._current()
        if sure and self._in_doubt():
            raise MeshUnavailable("which tools the mesh has is not known yet")
        return known.find(wishes)

    def _in_doubt(self) -> bool:
        if self._sure:
            return False
        self._doubted_at = self._doubted_at or time.monotonic()
        return time.monotonic() - self._doubted_at < DOUBT_S

    def heard_lately(self, prefix: str) -> bool:
        """Whether a service said within the last `KEEP_S` seconds that it serves `prefix`."""
        since = time.monotonic() - KEEP_S
        return any(
            spec.prefix == prefix
            for service in self._known.services.values()
            if service.heard_at >= since
            for manifest in service.manifests
            for spec in manifest.tools
        )

    def forget(self) -> None:
        """Ask the mesh again at the next call."""
        with self._lock:
            self._known = replace(self._known, at=float("-inf"))

    def _current(self) -> _Known:
        known = self._known
        fresh_s = min(self._kept_s, LOOK_AGAIN_S) if self._session.settling or self._in_doubt() else self._kept_s
        if time.monotonic() - known.at <= fresh_s:
            return known
        # Who comes while another refreshes takes what is a little stale; what is long stale, or nothing, is worth the wait.
        patient = time.monotonic() - known.at > 3 * self._kept_s
        if not self._refreshing.acquire(blocking=patient):
            return known
        try:
            if time.monotonic() - self._known.at > fresh_s:
                self._known = self._refresh(self._known)
            return self._known
        finally:
            self._refreshing.release()

    def _refresh(self, known: _Known) -> _Known:
        heard: dict[str, list[Manifest]] = {}
        complete = True
        try:
            session = self._session.opened(CONNECT_S)
            for reply in session.get(f"{CAPABILITIES}/*", consolidation=zenoh.ConsolidationMode.NONE, timeout=ANSWER_S):
                if reply.ok is None:
                    complete = False  # somebody was asked and did not answer in time
                    continue
                try:
                    manifest = decode_manifest(reply.ok.payload.to_bytes())
                except ValueError as error:
                    self._complain("?", "", str(error))
                    continue
                for prefix, why in manifest.skipped:
                    self._complain(manifest.service, prefix, why)
                heard.setdefault(manifest.service, []).append(manifest)
            settled = self._session.connected and not self._session.settling
            # one that hangs for long does not make the others unknown, while a hub that hangs does
            patient = time.monotonic() - self._doubted_at < HUNG_S
            self._sure = self._sure or (settled and (complete or (not patient and barrier(session))))
            complete = complete and settled
        except (MeshUnavailable, Misconfigured, zenoh.ZError) as error:
            self._complain("", "", f"the mesh cannot be asked ({type(error).__name__})")
            complete = False
        now = time.monotonic()
        services = {name: _Service(tuple(manifests), now) for name, manifests in heard.items()}
        for name, service in known.services.items():
            if name not in services and (not complete or now - service.heard_at <= KEEP_S):
                services[name] = service
        return _Known(now, services)

    def _complain(self, service: str, prefix: str, why: str) -> None:
        """Say each fault once."""
        if (service, prefix, why) in self._complaints:
            return
        if len(self._complaints) >= _MAX_COMPLAINTS:
            self._complaints.clear()
        self._complaints.add((service, prefix, why))
        log.warning("discovery: service %r, entry %r: %s", service, prefix, why)


def select(manifests: Iterable[Manifest], wishes: Sequence[Discover], *, absent: Iterable[Manifest] = ()) -> list[ToolSpec]:
    """The tools of `manifests` that one of `wishes` names, sorted by prefix, each key once.

    A key that several services serve may be answered by any of them: it is gated when one of them demands it, idempotent and
    asked by payload only when all are, and waited for as long as the slowest asks. Its words and schema are those of the first
    service by name; of services that are `absent`, only where no other serves the key.
    """
    owners: dict[str, list[tuple[bool, ToolSpec]]] = {}
    for away, some in ((False, manifests), (True, absent)):
        for manifest in some:
            for spec in manifest.tools:
                owners.setdefault(spec.prefix, []).append((away, spec))
    chosen: list[ToolSpec] = []
    for prefix in sorted(owners):
        ranked = sorted(owners[prefix], key=lambda owner: (owner[0], owner[1].service, str(owner[1].approval), owner[1].description))
        specs = [spec for _, spec in ranked]
        named = [spec for spec in specs if any(_wished(spec, wish) for wish in wishes)]
        if not named:
            continue
        demands = [spec.approval for spec in specs if spec.approval]
        extra = any(matches(pattern, prefix) for wish in wishes if _wished_any(named, wish) for pattern in wish.approval)
        chosen.append(
            replace(
                named[0],
                approval=next((demand for demand in demands if isinstance(demand, str)), True if demands or extra else None),
                idempotent=all(spec.idempotent for spec in specs),
                payload=all(spec.payload for spec in specs),
                timeout_s=max(spec.timeout_s for spec in specs),
            )
        )
    return chosen


def _wished(spec: ToolSpec, wish: Discover) -> bool:
    return (not wish.services or spec.service in wish.services) and any(matches(pattern, spec.prefix) for pattern in wish.patterns)


def _wished_any(specs: Sequence[ToolSpec], wish: Discover) -> bool:
    return any(_wished(spec, wish) for spec in specs)
