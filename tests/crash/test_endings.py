"""Mailbox and ending with real processes: who comes into a busy conversation, what is stopped, and what is tried again."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import redis

from tests.crash.conftest import Deployment

pytestmark = pytest.mark.slow

Deploy = Callable[..., Deployment]


def into(here: Deployment, conversation: str, name: str, on_busy: str, *rounds: Any, **more: Any) -> httpx.Response:
    """Submit into a conversation that may be busy."""
    script = {"name": name, "rounds": rounds} | more
    body = {"input": json.dumps(script), "conversation_id": conversation, "on_busy": on_busy}
    return here.http.post("/v1/agents/ledger/turns", json=body)


def inputs(here: Deployment, conversation: str) -> list[str]:
    """The names of the inputs in the conversation's history, in its order."""
    history = here.http.get(f"/v1/conversations/{conversation}/history").json()["history"]
    return [json.loads(entry["data"])["name"] for entry in history if entry["dir"] == "in"]


@contextmanager
def heard(here: Deployment) -> Iterator[list[dict[str, Any]]]:
    """The headers of every task that is sent meanwhile."""
    client = redis.Redis.from_url(here.stack.redis.url, decode_responses=True)
    said: list[dict[str, Any]] = []

    def listen(monitor: Any) -> None:
        for command in monitor.listen():
            words = command["command"]
            if words.startswith("PUBLISH end-of-listening"):
                return
            if words.startswith("LPUSH ") and '"task"' in words:
                said.append(json.loads(words.split(" ", 2)[2])["headers"])

    with client.monitor() as monitor:
        listener = threading.Thread(target=listen, args=(monitor,), daemon=True)
        listener.start()
        yield said
        redis.Redis.from_url(here.stack.redis.url).publish("end-of-listening", "")
        listener.join(30)


def test_an_interrupt_ends_a_running_turn_and_a_waiting_one(here: Deployment, name: str) -> None:
    here.worker()
    first = into(here, name, f"{name}.1", "queue", sleep_s=5).json()["turn_id"]
    here.until(lambda: here.ledger.asked(f"{name}.1") == 1, "the model to be asked")
    second = into(here, name, f"{name}.2", "interrupt", [("pay", {"key": name})]).json()["turn_id"]
    approval = here.waiting_approval(second)
    here.until(lambda: here.turn(second)["state"] == "waiting", "the turn to wait")
    third = into(here, name, f"{name}.3", "interrupt").json()["turn_id"]
    assert here.ended(third)["state"] == "completed"
    assert here.turn(first)["state"] == here.turn(second)["state"] == "cancelled"
    assert here.decide(approval["approval_id"]).status_code in (409, 410)
    assert here.ledger.effects(name) == 0 and inputs(here, name) == [f"{name}.{i}" for i in (1, 2, 3)]
    assert here.ledger.lines("faults") == []


def test_an_input_that_joins_is_seen_before_the_answer(here: Deployment, name: str) -> None:
    here.worker()
    turn = into(here, name, f"{name}.1", "queue", [("write", {"key": name, "sleep_s": 1.0})]).json()["turn_id"]
    here.until(lambda: here.turn(turn)["calls"], "the tool to be asked for")
    joined = into(here, name, f"{name}.2", "steer")
    assert joined.json()["turn_id"] == turn
    ended = here.ended(turn)
    assert ended["state"] == "completed" and ended["answer"].startswith(f"done {name}.2"), "the model answered what joined"
    assert inputs(here, name) == [f"{name}.1", f"{name}.2"] and here.ledger.effects(name) == 1


def test_a_conversation_and_a_tenant_hold_so_many_turns_and_no_more(deploy: Deploy) -> None:
    here = deploy(TURNMILL_MAX_WAITING_TURNS="5", TURNMILL_MAX_TENANT_WAITING_TURNS="12")
    urls = (here.stack.url, here.stack.add_replica("gateway").env["TURNMILL_PUBLIC_URL"])
    answers: list[tuple[str, httpx.Response]] = []

    def submit(url: str, conversation: str, count: int) -> None:
        with httpx.Client(base_url=url, timeout=30) as http:
            for i in range(count):
                body = {"input": json.dumps({"name": f"{conversation}.{i}"}), "conversation_id": conversation}
                answers.append((conversation, http.post("/v1/agents/ledger/turns", json=body)))

    threads = [threading.Thread(target=submit, args=(urls[n % 2], f"c{n // 2}", 5)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = [(conversation, answer.json()["turn_id"]) for conversation, answer in answers if answer.status_code == 202]
    refused = [answer for _, answer in answers if answer.status_code != 202]
    assert {(answer.status_code, answer.json()["code"]) for answer in refused} == {(429, "mailbox_full")}
    assert len(taken) == 4 + 12, "one runs in each of four conversations, and twelve wait"
    for number in range(4):
        assert sum(1 for conversation, _ in taken if conversation == f"c{number}") <= 6
    here.worker()
    for _, turn in taken:
        assert here.ended(turn)["state"] == "completed"
    assert redis.Redis.from_url(here.stack.redis.url).get("tm:dev:waiting") == b"0"
    assert here.ended(here.submit("after"))["state"] == "completed", "there is room again"


def test_what_runs_is_stopped_or_disowned_by_a_cancel(here: Deployment, name: str) -> None:
    here.worker()
    streaming = here.submit(f"{name}.s", tokens=200, token_s=0.05)
    working = here.submit(f"{name}.w", [("write", {"key": name, "sleep_s": 2.0}), ("note", {"key": f"{name}n"})])
    here.until(lambda: here.ledger.asked(f"{name}.s") == 1, "the model to be asked")
    assert here.http.post(f"/v1/turns/{streaming}/cancel").json()["state"] == "cancelled"
    here.until(lambda: any(call["state"] == "running" for call in here.turn(working)["calls"]), "the call to run")
    call = next(call for call in here.turn(working)["calls"] if call["name"] == "ledger-write")
    here.http.post(f"/v1/turns/{working}/calls/{call['call_id']}/cancel").raise_for_status()
    ended = here.ended(working)
    assert ended["state"] == "completed" and [one["state"] for one in ended["calls"]] == ["unknown_outcome", "completed"]
    here.until(lambda: here.ledger.effects(name) == 1, "the tool to end, for nobody")
    assert here.turn(working) == ended, "its late answer counts for nothing"
    frames = here.frames(streaming)
    assert frames[-1]["kind"] == "done" and here.frames(streaming) == frames


def test_a_deadline_ends_a_turn_whatever_it_does_and_no_message_stands_for_it(here: Deployment, name: str) -> None:
    here.worker()
    with heard(here) as said:
        body = {"input": json.dumps({"name": name, "sleep_s": 6}), "deadline_s": 1.5}
        asking = here.http.post("/v1/agents/ledger/turns", json=body).json()["turn_id"]
        body = {"input": json.dumps({"name": f"{name}t", "rounds": [[("write", {"key": name, "sleep_s": 6})]]}), "deadline_s": 1.5}
        working = here.http.post("/v1/agents/ledger/turns", json=body).json()["turn_id"]
        retried = here.submit(f"{name}r", [("note", {"key": f"{name}r"})], faults=2)
        for turn in (asking, working):
            assert here.ended(turn)["stop_reason"] == "deadline"
        assert here.ended(retried)["state"] == "completed"
    assert here.ledger.asked(f"{name}r") == 6, "each of two rounds twice in vain"
    assert said and all(headers["eta"] is None and headers["expires"] is None for headers in said)
    assert here.turn(working)["calls"][0]["state"] == "unknown_outcome"


def test_a_step_that_fails_for_good_ends_its_turn_and_says_why(here: Deployment, name: str) -> None:
    here.worker()
    ended = here.ended(here.submit(name, faults=100))
    assert ended["state"] == "failed" and ended["stop_reason"] == "error"
    assert ended["error"]["code"] == "model_rate_limited" and "too many requests" in ended["error"]["detail"]
