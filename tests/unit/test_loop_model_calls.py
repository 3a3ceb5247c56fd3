"""A model call as a step makes it: what watchers see of it while it runs, and what follows when it fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

from orchestration import Agent, AgentOutput, Delta, Limits, ModelReply
from orchestration.core.errors import ModelError
from orchestration.core.ids import StepId, StepKind
from orchestration.core.outbound import Delivery
from orchestration.models import ScriptedModel, Step
from orchestration.outbound.events import callback_body
from orchestration.state.journal import Claim, NotClaimed
from orchestration.steps.token_frames import TokenFrames
from orchestration.testing.frames import assert_whole, text_of
from orchestration.testing.local import LocalTurnmill

Turnmill = Callable[..., LocalTurnmill]


def claimed(here: LocalTurnmill) -> Claim:
    """The first plan of a new turn in the conversation c."""
    turn = here.submit("a", "hi", conversation_id="c")
    found = here.ports.journal.claim(StepId("dev", turn.turn_id, 1, StepKind.PLAN))
    assert not isinstance(found, NotClaimed)
    return found[0]


def test_pieces_become_at_most_one_frame_of_a_kind_in_40_ms(turnmill: Turnmill) -> None:
    here = turnmill(Agent("a", ScriptedModel([])))
    now = 0.0
    tokens = TokenFrames(claimed(here), here.ports, clock=lambda: now)
    for number in range(100):
        now = number * 0.01
        tokens(Delta(text=f"{number} ", thinking="hm" if number < 50 else ""))
    shown = [frame["kind"] for frame in here.frames("c")]
    assert 15 <= shown.count("token") <= 25 and 5 <= shown.count("thinking") <= 13, "for 100 pieces in one second"
    left = tokens.rest()
    assert len(left) == 1 and "99 " in left[0], "what came last goes out with the commit"
    assert tokens.rest() == []


def test_what_is_shown_in_pieces_is_the_whole_answer(turnmill: Turnmill) -> None:
    here = turnmill(Agent("a", ScriptedModel([Step("one two three", thinking="hm", chunks=3)])))
    here.ask("a", "hi", conversation_id="c")
    assert text_of(here.frames("c")) == "one two three"
    assert "".join(frame["text"] for frame in here.frames("c") if frame["kind"] == "thinking") == "hm"
    assert_whole(here.frames("c"))


def test_a_pause_that_a_server_asks_for_is_a_due_time_and_nobody_sleeps(turnmill: Turnmill) -> None:
    busy = ModelError("rate_limited", "slow down", retryable=True, retry_after_s=200)
    here = turnmill(Agent("a", ScriptedModel([busy, "done"])))
    turn = here.submit("a", "hi")
    step = here.queue.waiting.popleft()
    here.run_one(step)
    due: Any = here.ports.store.client.zscore("tm:due", f"step:{step}")
    assert 150_000 < due - here.ports.approvals.now_ms() <= 200_000
    assert not here.queue.waiting and here.run_one(step) == "busy", "a message that comes too early changes nothing"
    assert not here.ports.store.client.smembers(f"tm:run:{here.ports.lease.process}")
    here.run()
    assert here.turn(turn.turn_id)["answer"] == "done"


@pytest.mark.parametrize("kind", ["unavailable", "rate_limited", "protocol", "truncated"])
def test_what_may_pass_is_tried_as_often_as_the_limits_say(turnmill: Turnmill, kind: str) -> None:
    model = ScriptedModel([Step(error=kind)], repeat_last=True)
    turn = turnmill(Agent("a", model, limits=Limits(max_attempts=3))).ask("a", "hi")
    assert (turn["state"], turn["error"]["code"], model.asked) == ("failed", f"model_{kind}", 3)


@pytest.mark.parametrize("kind", ["quota", "auth", "bad_request", "content_filtered"])
def test_what_does_not_pass_ends_the_turn_at_once(turnmill: Turnmill, kind: str) -> None:
    model = ScriptedModel([Step(error=kind)], repeat_last=True)
    turn = turnmill(Agent("a", model)).ask("a", "hi")
    assert (turn["error"]["code"], model.asked) == (f"model_{kind}", 1)


def test_an_answer_that_a_provider_cut_for_its_content_is_an_error(turnmill: Turnmill) -> None:
    model = ScriptedModel([ModelReply("I wi", finish_reason="content_filter")])
    turn = turnmill(Agent("a", model)).ask("a", "hi")
    assert (turn["stop_reason"], turn["error"]["code"], turn["answer"]) == ("error", "model_content_filtered", "I wi")


def test_the_callback_carries_the_typed_answer(turnmill: Turnmill) -> None:
    class Triage(BaseModel):
        team: str

    here = turnmill(Agent("a", ScriptedModel([[("submit", {"team": "x"})]]), output=AgentOutput(Triage)))
    turn = here.ask("a", "hi", callback_url="https://example.com/hook")
    [name] = [str(entry) for entry in here.ports.store.client.zrange("tm:due", 0, -1) if str(entry).startswith("out:")]
    url, body = callback_body(here.ports, "dev", Delivery.parse(name.partition("/")[2]))
    assert url == "https://example.com/hook" and '"output":{"team":"x"}' in body and turn["turn_id"] in body
