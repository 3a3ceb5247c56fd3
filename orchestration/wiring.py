"""Ports from settings: the one place that knows both sides of each port."""

from __future__ import annotations

from dataclasses import dataclass

from orchestration.core.errors import Misconfigured
from orchestration.core.ports import Mesh, Queue
from orchestration.identity.sealing import TokenSeal
from orchestration.project import Project, load_project
from orchestration.settings import Settings
from orchestration.state.approvals import Approvals
from orchestration.state.audit import Audit
from orchestration.state.conversations import Conversations
from orchestration.state.due import Due
from orchestration.state.journal import Journal
from orchestration.state.leases import LeaseBook, ProcessLease
from orchestration.state.mailbox import Mailbox
from orchestration.state.outbound import Outbound
from orchestration.state.outbox import Outbox
from orchestration.state.secrets import Secrets
from orchestration.state.store import Store


@dataclass(frozen=True, slots=True)
class Ports:
    """All that actions and steps need from outside. One per process; safe for threads."""

    settings: Settings
    project: Project
    store: Store
    outbox: Outbox
    lease: ProcessLease
    leases: LeaseBook
    journal: Journal
    mailbox: Mailbox
    approvals: Approvals
    audit: Audit
    outbound: Outbound
    due: Due
    secrets: Secrets
    seal: TokenSeal
    conversations: Conversations
    queue: Queue
    mesh: Mesh


def make_ports(settings: Settings, project: Project, store: Store, queue: Queue, mesh: Mesh) -> Ports:
    """Ports over the given store, queue and mesh; tests give their own.

    Raises:
        Misconfigured: an agent forwards its callers' tokens, and there is no key to keep them with.
    """
    seal = TokenSeal(settings)
    forwarding = [agent.name for agent in project.agents.values() if agent.forward_token]
    if forwarding and not seal:
        raise Misconfigured(f"Agent({forwarding[0]!r}, forward_token=True) needs TURNMILL_TOKEN_KEY: 32 bytes in base64")
    outbox = Outbox(store)
    lease = ProcessLease(store, outbox)
    return Ports(
        settings=settings,
        project=project,
        store=store,
        outbox=outbox,
        lease=lease,
        leases=LeaseBook(store),
        journal=Journal(store, lease, outbox),
        mailbox=Mailbox(store),
        approvals=Approvals(store, outbox),
        audit=Audit(store),
        outbound=Outbound(store),
        due=Due(store),
        secrets=Secrets(store),
        seal=seal,
        conversations=Conversations(store),
        queue=queue,
        mesh=mesh,
    )


def open_ports(settings: Settings) -> Ports:
    """The ports of a process, on real systems. Nothing is connected before it is used.

    Raises:
        Misconfigured: a setting or the agents' module is wrong.
    """
    from orchestration.mesh.adapter import ZenohMesh
    from orchestration.queue.sender import CeleryQueue
    from orchestration.state.tool_records import RedisToolRecords

    store = Store(settings)
    mesh = ZenohMesh(settings, records=RedisToolRecords(store))
    return make_ports(settings, load_project(settings.agents), store, CeleryQueue(settings, store), mesh)
