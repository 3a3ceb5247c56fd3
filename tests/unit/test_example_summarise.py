"""The example compactor does what its page says."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from examples.summarise import Summarise
from orchestration import Agent, tool
from orchestration.core.model import Usage
from orchestration.models import ScriptedModel, Step
from orchestration.testing.frames import assert_paired
from orchestration.testing.local import LocalTurnmill


@tool("log/query")
def query(n: int) -> str:
    """Query the logs."""
    return f"pod {n} restarted"


def look(n: int) -> Step:
    return Step(tool_calls=[("log-query", {"n": n})], usage=Usage(500, 1))


def test_older_rounds_become_a_summary_and_a_later_one_summarises_that(turnmill: Callable[..., LocalTurnmill]) -> None:
    small = ScriptedModel(["pod 1 restarted", "pods 1 and 2 restarted"])
    model = ScriptedModel([look(1), look(2), look(3), look(4), "done"])
    here = turnmill(Agent("ops", model, tools=[query], compact_after=100, compactor=Summarise(small)))
    assert here.ask("ops", "dig into the api pod")["answer"] == "done"
    shown = model.requests[4].messages
    assert_paired(shown)
    assert [message["role"] for message in shown] == ["user", "user", "assistant", "tool", "assistant", "tool"]
    assert shown[0]["content"] == "dig into the api pod" and shown[1]["content"].endswith("pods 1 and 2 restarted")
    assert "pod 1 restarted" in small.requests[1].messages[1]["content"], "the first summary is summarised again"


def test_a_summariser_that_is_silent_or_away_loses_nothing(turnmill: Callable[..., LocalTurnmill]) -> None:
    small = ScriptedModel([Step(error="unavailable"), ""])
    model = ScriptedModel([look(1), look(2), look(3), "done"])
    here = turnmill(Agent("ops", model, tools=[query], compact_after=100, compactor=Summarise(small)))
    assert here.ask("ops", "dig")["answer"] == "done"
    assert len(model.requests[3].messages) == 7


@pytest.mark.parametrize("most", [100, 1_000_000])
def test_a_huge_transcript_is_cut_in_its_middle(most: int) -> None:
    small = ScriptedModel(["short"])
    made = Summarise(small, most_chars=most).compact([{"role": "user", "content": "first"}, {"role": "user", "content": "x" * 5000}])
    sent = small.requests[0].messages[1]["content"]
    assert (len(sent) < 200) == (most == 100)
    assert json.dumps(made).count("first") == 1
