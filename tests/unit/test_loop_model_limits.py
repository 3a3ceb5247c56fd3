"""Limits of a model hold for all workers together, cost no attempt, and make nobody wait for longer than needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from orchestration import Agent, Failover, Limited, ModelReply, RequestedCall, tool
from orchestration.core.errors import Misconfigured, ModelBusy
from orchestration.core.ids import StepId
from orchestration.core.model import Message, Usage
from orchestration.core.model_limits import ModelLimits, Taken
from orchestration.models import ScriptedModel
from orchestration.models.limited import counted
from orchestration.state.journal import Claim
from orchestration.state.model_limits import ModelPlaces
from orchestration.testing.local import LocalTurnmill

Turnmill = Callable[..., LocalTurnmill]


def claimed(here: LocalTurnmill, step: StepId) -> Claim:
    found = here.ports.journal.claim(step)
    assert isinstance(found, tuple)
    return found[0]


def places_of(here: LocalTurnmill, turns: int) -> tuple[list[ModelPlaces], list[StepId], list[StepId]]:
    """The places of as many claimed plans, their steps, and what is woken."""
    woken: list[StepId] = []
    steps = []
    for number in range(turns):
        here.submit("a", "hi", conversation_id=f"c{number}")
        steps.append(here.queue.waiting.popleft())
    return [ModelPlaces(here.ports.store, claimed(here, step), woken.extend) for step in steps], steps, woken


def agent(model: Any = None) -> Agent:
    return Agent("a", model or ScriptedModel(["x"], repeat_last=True))


def test_no_more_calls_are_under_way_than_allowed(turnmill: Turnmill) -> None:
    here = turnmill(agent())
    limits = ModelLimits("m", concurrency=2)
    [first, second, third], _, _ = places_of(here, 3)
    assert first.take(limits, 0) == second.take(limits, 0) == Taken()
    assert third.take(limits, 0).wait_s >= 1
    assert first.take(limits, 0) == Taken(), "asked again, it is the same place"
    first.give_back(limits, 0, 0)
    first.give_back(limits, 0, 0)
    assert third.take(limits, 0) == Taken() and first.take(limits, 0).wait_s > 0


def test_the_place_goes_to_whoever_waits_longest_and_nobody_overtakes(turnmill: Turnmill) -> None:
    here = turnmill(agent())
    limits = ModelLimits("m", concurrency=1)
    [first, *others], steps, woken = places_of(here, 4)
    first.take(limits, 0)
    for place, step in ((others[0], steps[1]), (others[1], steps[2])):
        place.take(limits, 0)
        here.ports.journal.commit("dev", step.turn_id, {"retry_in_ms": 60_000, "frames": [], "uncounted": True}, place._claim)
    first.give_back(limits, 0, 0)
    assert woken == [steps[1]]
    assert others[2].take(limits, 0).wait_s > 0, "the free place is kept for the one that was woken"
    for step in woken:
        here.ports.outbox.promote(step)
    again = ModelPlaces(here.ports.store, claimed(here, steps[1]), woken.extend)
    assert again.take(limits, 0) == Taken()


def test_a_place_that_became_free_at_the_wrong_moment_is_found(turnmill: Turnmill) -> None:
    here = turnmill(agent())
    limits = ModelLimits("m", concurrency=1)
    [first, second], steps, woken = places_of(here, 2)
    first.take(limits, 0)
    second.take(limits, 0)
    first.give_back(limits, 0, 0)
    assert woken == [], "the second has not recorded its pause yet"
    here.ports.journal.commit("dev", steps[1].turn_id, {"retry_in_ms": 60_000, "frames": []}, second._claim)
    second.look_again()
    assert woken == [steps[1]]


def test_what_a_dead_process_held_is_free(turnmill: Turnmill) -> None:
    here = turnmill(agent())
    limits = ModelLimits("m", concurrency=1)
    [first, second], _, _ = places_of(here, 2)
    first.take(limits, 0)
    dead = here.ports.lease.process
    here.ports.lease.register(instead_of=dead)
    end = here.ports.leases.end_of(dead)
    assert end is not None and here.ports.leases.depose(dead, end)
    assert second.take(limits, 0) == Taken()


def test_what_an_ended_step_held_is_free(turnmill: Turnmill) -> None:
    here = turnmill(agent())
    limits = ModelLimits("m", concurrency=1)
    [first, second], steps, _ = places_of(here, 2)
    first.take(limits, 0)
    here.ports.journal.commit("dev", steps[0].turn_id, {"frames": [], "fin": {"state": "failed", "stop": "error"}}, first._claim)
    assert second.take(limits, 0) == Taken()


def test_no_more_calls_begin_in_a_minute_than_allowed(turnmill: Turnmill) -> None:
    here = turnmill(agent())
    limits = ModelLimits("m", requests_per_minute=3)
    places, _, _ = places_of(here, 8)
    waits = [place.take(limits, 0).wait_s for place in places]
    assert waits[:3] == [0, 0, 0]
    assert all(59 < wait <= 60 for wait in waits[3:6]) and all(119 < wait <= 120 for wait in waits[6:]), "each has its time"
    assert 59 < places[3].take(limits, 0).wait_s <= 60, "asking again does not lose one's place"


def test_tokens_of_the_last_minute_count_as_they_were_used(turnmill: Turnmill) -> None:
    here = turnmill(agent())
    limits = ModelLimits("m", tokens_per_minute=1000)
    [first, second, third], _, _ = places_of(here, 3)
    assert first.take(limits, 400) == Taken()
    assert second.take(limits, 700).wait_s > 50, "what is under way counts as estimated"
    first.give_back(limits, 400, 100)
    assert second.take(limits, 700) == Taken()
    second.give_back(limits, 700, 900)
    assert third.take(limits, 1).wait_s > 50


def test_one_call_larger_than_the_limit_goes_alone(turnmill: Turnmill) -> None:
    here = turnmill(agent())
    [first, second], _, _ = places_of(here, 2)
    limits = ModelLimits("m", tokens_per_minute=10)
    assert first.take(limits, 5000) == Taken() and second.take(limits, 1).wait_s > 0


class Busy:
    """A model whose calls are seen: how many are under way at once."""

    model = "busy"

    def __init__(self, gate: threading.Barrier | None = None) -> None:
        self.now = self.most = self.asked = 0
        self.lock = threading.Lock()
        self.inside = threading.Event()
        self.go = threading.Event()

    def complete(self, messages: Sequence[Message], *, tools: Any = None) -> ModelReply:
        with self.lock:
            self.now += 1
            self.asked += 1
            self.most = max(self.most, self.now)
        self.inside.set()
        assert self.go.wait(30)
        with self.lock:
            self.now -= 1
        return ModelReply("ok", usage=Usage(1, 1))


def test_a_busy_model_gives_the_step_back_and_costs_no_attempt(turnmill: Turnmill) -> None:
    busy = Busy()
    here = turnmill(Agent("a", Limited(busy, concurrency=1)))
    turns = [here.submit("a", "hi", conversation_id=f"c{number}").turn_id for number in range(3)]
    first, *others = [here.queue.waiting.popleft() for _ in range(3)]
    thread = threading.Thread(target=here.run_one, args=(first,))
    thread.start()
    assert busy.inside.wait(30)
    for _ in range(25):  # more often than a step may be tried
        for step in others:
            here.run_one(step)
            here.ports.outbox.promote(step)
    busy.go.set()
    thread.join()
    here.queue.waiting.extend(others)
    here.run()
    assert [here.turn(turn)["answer"] for turn in turns] == ["ok"] * 3
    assert busy.most == 1 and busy.asked == 3


def test_the_end_of_a_call_wakes_the_step_that_waits(turnmill: Turnmill) -> None:
    busy = Busy()
    here = turnmill(Agent("a", Limited(busy, concurrency=1)))
    for number in range(2):
        here.submit("a", "hi", conversation_id=f"c{number}")
    first, second = here.queue.waiting.popleft(), here.queue.waiting.popleft()
    thread = threading.Thread(target=here.run_one, args=(first,))
    thread.start()
    assert busy.inside.wait(30)
    here.run_one(second)
    assert not here.queue.waiting
    busy.go.set()
    thread.join()
    assert second in here.queue.waiting, "rung for at once, not after its pause"


@tool("math/add")
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def test_a_place_is_held_only_while_the_model_is_asked(turnmill: Turnmill) -> None:
    model = ScriptedModel([RequestedCall("math-add", '{"a": 1, "b": 2}'), "done"])
    here = turnmill(Agent("a", Limited(model, concurrency=1, requests_per_minute=100, tokens_per_minute=100_000), tools=[add]))
    assert here.ask("a", "hi")["answer"] == "done"
    assert here.ports.store.client.zcard("tm:model:scripted:held") == 0


def test_models_of_one_name_share_their_limits(turnmill: Turnmill) -> None:
    first, second = (Limited(ScriptedModel(["x"]), requests_per_minute=1, name="team") for _ in range(2))
    here = turnmill(Agent("a", first), Agent("b", second))
    assert here.ask("a", "hi")["state"] == "completed"
    here.submit("b", "hi")
    here.run_one(here.queue.waiting.popleft())
    assert second.inner.asked == 0  # type: ignore[attr-defined]


def test_a_busy_model_in_a_row_lets_the_next_one_answer(turnmill: Turnmill) -> None:
    first, second = ScriptedModel(["one"], repeat_last=True), ScriptedModel(["two"], repeat_last=True)
    here = turnmill(Agent("a", Failover(Limited(first, requests_per_minute=1, name="first"), second)))
    assert [here.ask("a", "hi")["answer"] for _ in range(3)] == ["one", "two", "two"]


def test_models_that_are_all_busy_cost_no_attempt(turnmill: Turnmill) -> None:
    both = [Limited(ScriptedModel(["x"], repeat_last=True), requests_per_minute=1, name=name) for name in ("f", "s")]
    here = turnmill(Agent("a", Failover(*both)))
    [places], _, _ = places_of(here, 1)
    with counted(places):
        Failover(*both).complete([])
        Failover(*both).complete([])
        with pytest.raises(ModelBusy) as busy:
            Failover(*both).complete([])
    assert busy.value.retry_after_s is not None and busy.value.retryable


def test_outside_of_a_step_nobody_counts() -> None:
    model = Limited(ScriptedModel(["x"], repeat_last=True), requests_per_minute=1)
    assert [model.complete([{"role": "user", "content": "hi"}]).content for _ in range(3)] == ["x"] * 3


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Limited(ScriptedModel(["x"])),
        lambda: Limited(ScriptedModel(["x"]), concurrency=0),
        lambda: Limited(ScriptedModel(["x"]), requests_per_minute=1.5),  # type: ignore[arg-type]
        lambda: Limited("gpt", concurrency=1),  # type: ignore[arg-type]
    ],
)
def test_limits_that_cannot_be_any_are_refused(wrong: Callable[[], Any]) -> None:
    with pytest.raises(Misconfigured):
        wrong()
