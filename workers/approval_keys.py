"""Approvals for peers on the mesh: of all control workers one answers at a time, the others stand by. A peer that asks every node hears of
each request once."""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

from orchestration.actions.decide import decide
from orchestration.core.approval import Approval, ApprovalState
from orchestration.core.errors import AlreadyDecided, ApprovalCancelled, ApprovalExpired, StoreUnavailable, Unauthorized
from orchestration.core.principal import DEVELOPER, Principal, Scope
from orchestration.identity.callers import Callers
from orchestration.mesh.adapter import ZenohMesh
from orchestration.mesh.approvals import ApprovalKeys
from orchestration.settings import Settings
from orchestration.state.leases import new_process_name
from orchestration.wiring import Ports

log = logging.getLogger("turnmill.approvals")

#: Approvals that are read at a time for a list.
PAGE = 500

#: The duty that is led.
DUTY = "approvals"

#: How long a leadership holds that is not renewed, in milliseconds, and how often it is renewed or looked for, in seconds. That of a
#: dead process ends sooner: with its lease, which its dropped liveliness token costs it.
LEADER_MS, TICK_S = 1500, 0.2


class Desk:
    """What the keys ask: who somebody is, what waits, and the decision; over the same actions as REST."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._callers = Callers(ports.settings, ports.store)
        self._open = only_on_this_machine(ports.settings)

    def who(self, token: str) -> Principal | None:
        """Whose token this is. Without one nobody, unless nobody has a token and the mesh does not leave this machine."""
        if token:
            try:
                return self._callers.identify(token).principal
            except Unauthorized:
                return None
        return DEVELOPER if self._open and not self._callers.exist() else None

    def pending(self, principal: Principal) -> Iterator[Approval]:
        """What waits for a human and the principal may read, oldest first, a page at a time."""
        after = 0
        while Scope.APPROVALS_READ in principal.scopes:
            page, after = self._ports.approvals.page(principal.tenant, ApprovalState.PENDING, after=after, most=PAGE)
            yield from page
            if not after:
                return

    def decide(self, principal: Principal, approval_id: str, approved: bool, arguments: dict[str, Any] | None, note: str) -> Approval:
        """Decide as over REST; the approval as it stands then, whoever decided it."""
        try:
            decide(self._ports, principal, approval_id, approved, arguments, note, "mesh")
        except (AlreadyDecided, ApprovalExpired, ApprovalCancelled):
            log.info("a decision over the mesh came too late for %s", approval_id)
        return self._ports.approvals.get(principal.tenant, approval_id)


class ApprovalsOnMesh:
    """The thread that keeps this process in the running for the keys; serves them while it leads."""

    def __init__(self, ports: Ports, mesh: ZenohMesh) -> None:
        self._ports = ports
        self._until = 0.0
        self._node = hashlib.sha256(new_process_name().encode()).hexdigest()[:8]
        self.keys = ApprovalKeys(mesh.session, ports.settings.service, self._node, Desk(ports), self._may_answer)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="turnmill-approvals", daemon=True)

    def start(self) -> None:
        """Begin to stand by."""
        self._thread.start()

    def stop(self) -> None:
        """Take the keys back; another process serves them at once."""
        self._stopping.set()
        self._thread.join(timeout=5)
        self.keys.close()
        try:
            self._ports.leases.step_down(DUTY, self._name())
        except StoreUnavailable:
            log.warning("the approvals' keys could not be handed on; another process takes them soon")

    def _run(self) -> None:
        while True:
            try:
                self._look()
            except StoreUnavailable as error:
                log.warning("approvals on the mesh: %s", error)
            except Exception as error:
                log.error("approvals on the mesh: %s", type(error).__name__)
            if self._stopping.wait(TICK_S):
                return

    def _name(self) -> str:
        """Under which it leads: a process that was taken for dead goes on under another name."""
        return f"{self._ports.lease.process}#{self._node}"

    def _may_answer(self) -> bool:
        """Whether another does not answer by now: a process that slept is told by its own clock, one that was deposed by the store."""
        return time.monotonic() < self._until and self._ports.leases.leads(DUTY, self._name())

    def _look(self) -> None:
        asked = time.monotonic()
        if self._ports.lease.process and self._ports.leases.lead(DUTY, self._name(), LEADER_MS):
            # counted from before it was asked for: whoever is slow stays silent sooner than another begins to answer
            self._until = asked + LEADER_MS / 1000
            if not self.keys.serving:
                self.keys.serve()
                log.info("approvals are served on the mesh as %s", self.keys.key)
        else:
            self.keys.withdraw()


def approvals_on_mesh(ports: Ports) -> ApprovalsOnMesh | None:
    """Put this process in the running for the keys; None where it has no mesh to serve anything on."""
    settings, mesh = ports.settings, ports.mesh
    if not isinstance(mesh, ZenohMesh) or not (settings.mesh_connect or settings.mesh_listen or settings.mesh_config):
        return None
    standing_by = ApprovalsOnMesh(ports, mesh)
    standing_by.start()
    return standing_by


def only_on_this_machine(settings: Settings) -> bool:
    """Whether every endpoint of the mesh that this process knows is loopback."""
    return not settings.mesh_config and all(_is_local(endpoint) for endpoint in (*settings.mesh_connect, *settings.mesh_listen))


def _is_local(endpoint: str) -> bool:
    scheme, _, where = endpoint.partition("/")
    if scheme.startswith("unix"):
        return True
    host = where.partition("#")[0].rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
