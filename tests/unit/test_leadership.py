"""Who leads a duty of which there must be one at a time: the first that asks, until it stops asking or loses its lease."""

from __future__ import annotations

from orchestration.state.leases import ProcessLease
from tests.fixtures.approvals import Script, local


def test_one_leads_until_its_lease_is_taken_away() -> None:
    here = local(Script())
    book, first = here.ports.leases, here.ports.lease
    other = ProcessLease(here.ports.store, here.ports.outbox)
    other.register()
    assert book.lead("approvals", f"{first.process}#a", 60_000)
    assert not book.lead("approvals", f"{other.process}#b", 60_000) and not book.leads("approvals", f"{other.process}#b")
    ends = book.end_of(first.process)
    assert ends is not None and book.depose(first.process, ends)
    assert book.leads("approvals", f"{first.process}#a"), "nobody has asked since"
    assert book.lead("approvals", f"{other.process}#b", 60_000)
    assert not book.leads("approvals", f"{first.process}#a") and not book.lead("approvals", f"{first.process}#a", 60_000)


def test_who_steps_down_or_stops_makes_room_at_once() -> None:
    here = local(Script())
    book, first = here.ports.leases, here.ports.lease
    other = ProcessLease(here.ports.store, here.ports.outbox)
    other.register()
    assert book.lead("sweeps", first.process, 60_000)
    book.step_down("sweeps", other.process)
    assert not book.lead("sweeps", other.process, 60_000), "only the leader steps down"
    book.step_down("sweeps", first.process)
    assert book.lead("sweeps", other.process, 60_000)
    other.give_back()
    assert book.lead("sweeps", first.process, 60_000), "its lease went with it"
