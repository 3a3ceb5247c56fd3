"""What `make demo` shows, checked from outside: with HTTP calls of our own on real processes, and by running the demo itself."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import pytest
from rich.console import Console

from examples.demo import CORRECTED_AMOUNT, ROOT, TEXT, active_tasks, demo_stack, send_webhook
from orchestration.testing.parts import wait_until
from orchestration.testing.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@dataclass
class Journey:
    """One turn as somebody outside saw it."""

    accepted: dict[str, Any] = field(default_factory=dict)
    right_after: dict[str, Any] = field(default_factory=dict)
    frames: list[dict[str, Any]] = field(default_factory=list)
    frames_while_waiting: list[dict[str, Any]] = field(default_factory=list)
    waiting: dict[str, Any] = field(default_factory=dict)
    active: dict[str, list[Any]] = field(default_factory=dict)
    listed: list[dict[str, Any]] = field(default_factory=list)
    settled: dict[str, Any] = field(default_factory=dict)
    turn: dict[str, Any] = field(default_factory=dict)
    again: dict[str, Any] = field(default_factory=dict)

    def seen(self, kind: str, frames: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
        return [frame for frame in (self.frames if frames is None else frames) if frame["kind"] == kind]

    def call(self, name: str, turn: dict[str, Any] | None = None) -> dict[str, Any]:
        (found,) = [call for call in (turn or self.turn)["calls"] if call["name"] == name]
        return dict(found)


@pytest.fixture(scope="module")
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    with demo_stack(SECRET, Console(quiet=True)) as running:
        yield running
        if request.session.testsfailed:
            print(running.logs())


@pytest.fixture(scope="module")
def journey(stack: Stack) -> Journey:
    seen = Journey()
    message = {"customer": f"cu_{secrets.token_hex(4)}", "text": TEXT}
    delivery = f"msg_{secrets.token_hex(8)}"
    with httpx.Client(base_url=stack.url, timeout=30) as client:
        seen.accepted = send_webhook(client, SECRET, message, delivery_id=delivery)
        turn_id = seen.accepted["turn_id"]
        seen.right_after = client.get(f"/v1/turns/{turn_id}").json()
        watcher = threading.Thread(target=follow, args=(f"{stack.url}/v1/turns/{turn_id}/frames", seen.frames), daemon=True)
        watcher.start()
        wait_until(lambda: client.get(f"/v1/turns/{turn_id}").json()["state"] == "waiting", "the turn waits")
        wait_until(lambda: seen.seen("approval_request") and seen.seen("tool_result"), "the watcher saw the request and the sum")
        wait_until(lambda: not any(active_tasks(stack).values()), "no worker is held")
        seen.frames_while_waiting = list(seen.frames)
        seen.waiting = client.get(f"/v1/turns/{turn_id}").json()
        seen.active = active_tasks(stack)
        seen.listed = client.get("/v1/approvals", params={"state": "pending"}).json()["approvals"]
        (approval,) = [one for one in seen.listed if one["turn_id"] == turn_id]
        decision = {"approved": True, "arguments": {**approval["arguments"], "amount": CORRECTED_AMOUNT}}
        response = client.post(f"/v1/approvals/{approval['approval_id']}/decision", json=decision)
        assert response.status_code == 200, response.text
        seen.settled = response.json()
        wait_until(lambda: seen.seen("done"), "the turn is done")
        watcher.join(30)
        assert not watcher.is_alive(), "the stream ends after `done`"
        seen.turn = client.get(f"/v1/turns/{turn_id}").json()
        seen.again = send_webhook(client, SECRET, message, delivery_id=delivery)
    return seen


def follow(url: str, frames: list[dict[str, Any]]) -> None:
    with httpx.stream("GET", url, timeout=httpx.Timeout(30, read=120)) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        event: dict[str, str] = {}
        for line in response.iter_lines():
            name, _, value = line.partition(":")
            if name:
                event[name] = value.strip()
            elif event:
                frame = json.loads(event["data"])
                assert (str(frame["seq"]), frame["kind"]) == (event["id"], event["event"])
                frames.append(frame)
                event = {}


def test_1_a_signed_webhook_becomes_one_turn(journey: Journey) -> None:
    assert journey.accepted["turn_id"].startswith("tn_")
    assert journey.again["turn_id"] == journey.accepted["turn_id"], "a delivery that is repeated is the same turn"


@pytest.mark.parametrize("secret", ["whsec_" + "QUFB" * 8, "whsec_" + "AAAA" * 8])
def test_1_a_webhook_with_a_wrong_signature_becomes_none(stack: Stack, secret: str) -> None:
    with httpx.Client(base_url=stack.url, timeout=30) as client, pytest.raises(Exception, match="401"):
        send_webhook(client, secret, {"customer": "cu_0", "text": TEXT})


def test_2_the_answer_comes_before_the_turn_has_ended_and_its_stream_is_live(journey: Journey) -> None:
    assert journey.right_after["state"] in ("queued", "running", "waiting")
    assert journey.seen("token", journey.frames_while_waiting), "tokens came while the turn was under way"
    numbers = [frame["seq"] for frame in journey.frames]
    assert numbers == sorted(set(numbers))


def test_3_the_model_asks_for_both_tools_and_the_owner_wants_a_human(journey: Journey) -> None:
    asked = {frame["name"]: frame["arguments"] for frame in journey.seen("tool_call", journey.frames_while_waiting)}
    assert asked == {"math-add": {"a": 19.5, "b": 22.5}, "billing-refund": {"order_id": "o-42", "amount": 25.5}}
    (request,) = journey.seen("approval_request", journey.frames_while_waiting)
    assert (request["name"], request["reason"]) == ("billing-refund", "moves real money")


def test_4_the_sum_has_run_while_the_refund_holds_no_worker(journey: Journey) -> None:
    assert journey.call("math-add", journey.waiting)["state"] == "completed"
    assert journey.call("billing-refund", journey.waiting)["state"] == "waiting"
    assert len(journey.active) == 2 and not any(journey.active.values())


def test_5_the_refund_runs_once_with_the_corrected_amount_and_the_model_answers(journey: Journey) -> None:
    assert journey.settled["state"] == "approved" and journey.settled["decided_by"] == "dev"
    results = {frame["name"]: frame for frame in journey.seen("tool_result")}
    assert len(journey.seen("tool_result")) == 2 and not any(frame["error"] for frame in results.values())
    assert json.loads(results["billing-refund"]["content"])["refunded"] == CORRECTED_AMOUNT
    kinds = [frame["kind"] for frame in journey.frames]
    assert kinds.index("approval_decision") < kinds.index("message") < kinds.index("done") == len(kinds) - 1
    (message,) = journey.seen("message")
    assert "42.0" in message["content"] and str(CORRECTED_AMOUNT) in message["content"]


def test_6_the_turn_can_be_read_as_it_ended(journey: Journey) -> None:
    turn = journey.turn
    assert (turn["state"], turn["stop_reason"], turn["rounds"], turn["error"]) == ("completed", "answer", 2, None)
    assert turn["answer"] == journey.seen("message")[0]["content"]
    assert [(call["name"], call["state"]) for call in turn["calls"]] == [("math-add", "completed"), ("billing-refund", "completed")]
    assert journey.call("billing-refund")["arguments"] == {"order_id": "o-42", "amount": CORRECTED_AMOUNT}
    assert turn["usage"]["output_tokens"] > 0


def test_the_demo_itself_ends_well_and_leaves_no_process_behind() -> None:
    mark = secrets.token_hex(16)
    played = subprocess.run(
        [sys.executable, "-m", "examples.demo"],
        cwd=ROOT,
        env={**os.environ, "DEMO_MARK": mark},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert played.returncode == 0, played.stdout + played.stderr
    for number in range(1, 7):
        assert f"\n{number}. " in played.stdout
    assert "http://127.0.0.1:8000" in played.stdout
    wait_until(lambda: not marked(mark), "every process of the demo has ended")


def marked(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("DEMO_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found
