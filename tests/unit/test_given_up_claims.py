"""Steps that a living process has claimed and does not work on any more: they are handed back, each by the rules of its kind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from orchestration import Agent, tool
from orchestration.core.errors import StoreUnavailable
from orchestration.core.ids import StepId, StepKind
from orchestration.models import ScriptedModel, Step
from orchestration.state import journal
from orchestration.state.journal import Claim, NotClaimed
from orchestration.steps import tool as tool_module
from orchestration.testing.local import LocalTurnmill
from workers.given_up import hand_back

ran: list[str] = []


@pytest.fixture(autouse=True)
def empty_ledger() -> None:
    ran.clear()


@tool("web/buy")
def buy(what: str) -> str:
    """Buy something."""
    ran.append(what)
    return f"bought {what}"


@tool("web/search", idempotent=True)
def search(what: str) -> str:
    """Search the web."""
    ran.append(what)
    return f"found {what}"


class Unforeseen(BaseException):
    """What no handler of a step expects."""


def here_with(*names: str) -> LocalTurnmill:
    asks = Step(tool_calls=[(f"web-{name}", {"what": name}) for name in names])
    return LocalTurnmill(Agent("support", ScriptedModel([asks, "done"]), tools=[buy, search]), buy, search)


def breaking(times: int, error: type[BaseException]) -> Callable[[str, StepId], None]:
    """What stands in for `reached`: right after a tool's claim the step is left, so many times."""
    left = [times]

    def reached(point: str, step: StepId) -> None:
        if point == "claimed" and step.kind is StepKind.TOOL and left[0]:
            left[0] -= 1
            raise error(point)

    return reached


def run(here: LocalTurnmill) -> None:
    """Run, with the look that a worker's lease keeper takes whenever a step was left in an unexpected way."""
    while True:
        with suppress(Unforeseen, ValueError):
            here.run()
        if not here.ports.lease.look.is_set():
            return
        here.ports.lease.look.clear()
        hand_back(here.ports)


@pytest.mark.parametrize("error", [Unforeseen, ValueError])
@pytest.mark.parametrize(("name", "state", "effects"), [("buy", "unknown_outcome", 0), ("search", "completed", 1)])
def test_a_call_that_was_given_up_goes_on_by_its_tools_rule(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], name: str, state: str, effects: int
) -> None:
    monkeypatch.setattr(tool_module, "reached", breaking(1, error))
    here = here_with(name)
    turn = here.submit("support", "go")
    run(here)
    ended = here.turn(turn.turn_id)
    assert ended["state"] == "completed" and ended["calls"][0]["state"] == state
    assert len(ran) == effects
    assert here.ports.store.client.keys("tm:run:*") == []


def test_a_step_that_is_always_given_up_ends_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_module, "reached", breaking(1000, Unforeseen))
    here = here_with("search")
    turn = here.submit("support", "go")
    run(here)
    ended = here.turn(turn.turn_id)
    assert ended["state"] == "failed" and ended["error"]["code"] == "step_lost"
    hand_back(here.ports)
    assert here.ports.store.client.keys("tm:run:*") == [] and ran == []


def test_what_is_under_way_is_left_alone() -> None:
    here = here_with("buy")
    here.submit("support", "go")
    step = here.queue.waiting.popleft()
    with here.ports.lease.working():
        assert not isinstance(here.ports.journal.claim(step), NotClaimed)
        hand_back(here.ports)
        assert here.ports.leases.steps_of(here.ports.lease.process) == [step]
        with here.ports.lease.working():
            pass
        assert here.ports.lease.given_up() == []
    [found] = here.ports.lease.given_up()
    assert found.step == step and not found.unbegun


@pytest.mark.parametrize("name", ["buy", "search"])
def test_a_claim_that_was_given_up_without_an_answer_and_stands_all_the_same_was_never_begun(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(journal, "CLAIM_PATIENCE_S", -1.0)
    here = here_with(name)
    turn = here.submit("support", "go")
    here.run_one(here.queue.waiting.popleft())
    run_script = here.ports.store.run

    def lost(script: str, *args: Any) -> Any:
        answer = run_script(script, *args)
        if script == "claim":
            raise StoreUnavailable("the store does not answer")
        return answer

    monkeypatch.setattr(here.ports.store, "run", lost)
    with pytest.raises(StoreUnavailable):
        here.run_one(here.queue.waiting.popleft())
    monkeypatch.setattr(here.ports.store, "run", run_script)
    assert here.turn(turn.turn_id)["calls"][0]["state"] == "running"
    here.ports.lease.look.clear()
    hand_back(here.ports)
    run(here)
    ended = here.turn(turn.turn_id)
    assert ended["state"] == "completed" and ended["calls"][0]["state"] == "completed" and ran == [name]


def test_what_is_handed_back_twice_is_passed_on_once() -> None:
    here = here_with("search")
    turn = here.submit("support", "go")
    here.run_one(here.queue.waiting.popleft())
    step = here.queue.waiting.popleft()
    with here.ports.lease.working():
        claimed = here.ports.journal.claim(step)
    assert not isinstance(claimed, NotClaimed)
    owner = claimed[0].owner
    assert [str(one) for one in here.ports.leases.reclaim(step, owner, result=None)] == [str(step)]
    assert here.ports.leases.reclaim(step, owner, result=None) == []
    again = here.ports.journal.claim(step)
    assert not isinstance(again, NotClaimed) and isinstance(again[0], Claim)
    assert here.ports.leases.reclaim(step, owner, result=None) == [], "a newer claim of the same process is another's"
    assert here.ports.leases.steps_of(here.ports.lease.process) == [step]
    assert here.turn(turn.turn_id)["state"] == "running"


def test_steps_of_a_deposed_process_are_left_to_whoever_passes_them_on() -> None:
    here = here_with("search")
    here.submit("support", "go")
    step = here.queue.waiting.popleft()
    with here.ports.lease.working():
        here.ports.journal.claim(step)
    process = here.ports.lease.process
    here.ports.lease.give_back()
    assert here.ports.lease.given_up() == []
    assert here.ports.leases.steps_of(process) == [step]
