"""A decision that comes before its call was ever parked, around the death of whoever was about to park it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.crash.conftest import Deployment

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("approved", [True, False])
@pytest.mark.parametrize("fault", ["committed:plan", "before_claim:tool"])
def test_a_decision_before_the_header_ever_ran_is_carried_out(
    here: Deployment, name: str, tmp_path: Path, fault: str, approved: bool
) -> None:
    doomed = here.worker(fault=f"{fault}:kill:{tmp_path / 'once'}")
    turn = here.submit(name, [("pay", {"key": name}), ("write", {"key": f"{name}w"})])
    approval = here.waiting_approval(turn)
    here.until(lambda: not doomed.running, "the worker to die")
    assert here.decide(approval["approval_id"], approved).status_code == 200
    here.worker()
    ended = here.ended(turn)
    assert ended["state"] == "completed"
    assert [call["state"] for call in ended["calls"]] == ["completed" if approved else "denied", "completed"]
    assert here.ledger.effects(name) == (1 if approved else 0) and here.ledger.effects(f"{name}w") == 1
    assert here.ledger.asked(name) == 2, "the round was opened once, and answered once"


@pytest.mark.parametrize("approved", [True, False])
def test_a_decision_while_the_header_is_about_to_look_is_seen_by_it(here: Deployment, name: str, tmp_path: Path, approved: bool) -> None:
    held_up = here.worker(fault=f"before_claim:tool:stop:{tmp_path / 'once'}")
    turn = here.submit(name, [("pay", {"key": name})])
    approval = here.waiting_approval(turn)
    here.until(lambda: (tmp_path / "once").exists(), "the header to be about to look")
    assert here.decide(approval["approval_id"], approved).status_code == 200
    assert held_up.pid is not None
    here.until(lambda: _stopped(held_up.pid or 0), "the worker to stand still")
    os.kill(held_up.pid, signal.SIGCONT)
    ended = here.ended(turn)
    assert ended["calls"][0]["state"] == ("completed" if approved else "denied")
    assert here.ledger.effects(name) == (1 if approved else 0) and here.ledger.asked(name) == 2


def test_an_approval_that_a_frame_names_can_be_decided_at_once(here: Deployment, name: str) -> None:
    here.worker()
    for number in range(10):
        key = f"{name}.{number}"
        turn = here.submit(key, [("pay", {"key": key}), ("pay", {"key": f"{key}+"})])
        kinds = []
        with here.http.stream("GET", f"/v1/turns/{turn}/frames") as stream:
            for line in stream.iter_lines():
                frame = json.loads(line[5:]) if line.startswith("data:") else {}
                kinds.append(frame.get("kind"))
                if frame.get("kind") == "approval_request":
                    answer = here.decide(frame["approval_id"], number % 2 == 0)
                    assert answer.status_code == 200, answer.text
                if frame.get("kind") == "done":
                    break
        assert kinds.count("approval_request") == kinds.count("approval_decision") == kinds.count("tool_result") == 2
        assert here.ended(turn)["state"] == "completed"
        assert here.ledger.effects(key) == here.ledger.effects(f"{key}+") == (1 if number % 2 == 0 else 0)


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
