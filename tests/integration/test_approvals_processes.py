"""Approvals with real processes: restarts of everything, races, an owner that changes its mind, and peers on the mesh."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest
import redis

from tests.integration.approvals_stage import KEYS, Desk, desk, look, wire
from tests.integration.mesh_stage import istos_node

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    with desk(tmp_path_factory.mktemp("ledger")) as made:
        yield made


@pytest.fixture
def key() -> str:
    return uuid.uuid4().hex[:8]


def test_gated_calls_of_one_round_are_decided_one_by_one_and_each_runs_once(here: Desk, key: str) -> None:
    turn = here.submit(wire(f"{key}a"), look(key), wire(f"{key}b"), wire(f"{key}c"))
    first, second, third = here.waiting(turn)
    assert here.ledger.effects(f"look {key}") == 1, "the ungated one runs meanwhile"
    assert here.decide(third, True).status_code == 200
    assert here.decide(first, True, arguments={"key": f"{key}a", "amount": 2}).status_code == 200
    here.until(lambda: here.ledger.effects(f"{key}a 2"), "the first to run")
    assert here.turn(turn)["state"] in ("waiting", "running")
    assert here.decide(second, False, note="not this one").status_code == 200
    ended = here.ended(turn)
    assert [call["state"] for call in ended["calls"]] == ["completed", "completed", "denied", "completed"]
    assert here.ledger.effects(f"{key}a 2") == here.ledger.effects(f"{key}c 5") == 1
    assert not [line for line in here.ledger.lines("effects") if line.startswith(f"{key}b")]
    assert "not this one" in ended["answer"]


def test_opposite_answers_at_the_same_moment_many_times(here: Desk, key: str) -> None:
    turns = [here.submit(wire(f"{key}{n}")) for n in range(10)]
    for number, turn in enumerate(turns):
        [id_] = here.waiting(turn)
        with ThreadPoolExecutor(8) as pool:
            yes = [pool.submit(here.decide, id_, True, "ann") for _ in range(4)]
            no = [pool.submit(here.decide, id_, False, "bob") for _ in range(4)]
        won = here.approval(id_)["state"] == "approved"
        assert [one.result().status_code for one in yes] == [200 if won else 409] * 4
        assert [one.result().status_code for one in no] == [409 if won else 200] * 4
        assert here.ended(turn)["calls"][0]["state"] == ("completed" if won else "denied")
        assert here.ledger.effects(f"{key}{number} 5") == (1 if won else 0)
        assert len(here.frames(turn, "approval_decision")) == 1


def test_a_decision_at_the_instant_of_the_expiry_has_one_outcome(here: Desk, key: str) -> None:
    turns = [here.submit(wire(f"{key}{n}"), agent="hurried") for n in range(4)]
    ids = [here.waiting(turn)[0] for turn in turns]
    expires = [_epoch(here.approval(id_)["expires_at"]) for id_ in ids]
    for number, (turn, id_) in enumerate(zip(turns, ids, strict=True)):
        while time.time() < expires[number]:
            time.sleep(0.005)
        answer = here.decide(id_, True)
        ended = here.ended(turn)
        assert answer.status_code in (200, 410)
        assert ended["calls"][0]["state"] == ("completed" if answer.status_code == 200 else "expired")
        assert here.ledger.effects(f"{key}{number} 5") == (1 if answer.status_code == 200 else 0)


def test_a_quorum_and_edited_arguments(here: Desk, key: str) -> None:
    turn = here.submit(wire(key), agent="paired")
    [id_] = here.waiting(turn)
    edited = {"key": key, "amount": 3}
    broken = here.decide(id_, True, arguments={"key": key, "amount": "a lot"})
    assert broken.status_code == 422 and broken.json()["code"] == "arguments_invalid"
    assert here.decide(id_, True, "ann", arguments=edited).json()["state"] == "pending"
    assert here.decide(id_, True, "bob").json()["code"] == "arguments_differ"
    assert here.decide(id_, True, "bob", arguments=edited).json()["state"] == "approved"
    assert here.ended(turn)["state"] == "completed"
    assert [line for line in here.ledger.lines("effects") if line.startswith(key)] == [f"{key} 3"]


def test_a_cancel_at_the_same_moment_as_a_decision(here: Desk, key: str) -> None:
    for number in range(4):
        turn = here.submit(wire(f"{key}{number}"))
        [id_] = here.waiting(turn)
        with ThreadPoolExecutor(2) as pool:
            cancelled = pool.submit(here.ask, "POST", f"/v1/turns/{turn}/cancel")
            decided = pool.submit(here.decide, id_, True)
        assert cancelled.result().status_code in (200, 409)
        ended = here.ended(turn)
        if decided.result().status_code == 410:
            assert ended["state"] == "cancelled" and here.ledger.effects(f"{key}{number} 5") == 0
            assert here.approval(id_)["state"] == "cancelled"
        else:
            assert decided.result().status_code == 200 and here.approval(id_)["state"] == "approved"
        assert here.ledger.effects(f"{key}{number} 5") <= 1


def test_a_broken_hook_strands_nothing_and_is_tried_again(here: Desk, key: str) -> None:
    turn = here.submit(wire(key), agent="paired")
    [id_] = here.waiting(turn)
    here.until(lambda: here.ledger.lines("hook").count(id_) >= 2, "the second attempt of the hook")
    assert here.decide(id_, False).status_code == 200
    assert here.ended(turn)["state"] == "completed"


def test_a_process_that_dies_while_it_tells_a_human_is_followed_by_another(here: Desk, key: str) -> None:
    turn = here.submit(wire(key), agent="patient")
    [id_] = here.waiting(turn)
    here.until(lambda: id_ in here.ledger.lines("hook"), "the hook to begin")
    here.stack["control"].kill()
    here.stack["control"].start().wait_ready()
    here.until(lambda: id_ in here.ledger.lines("told"), "somebody else to tell")
    assert here.ledger.lines("hook").count(id_) == 2
    assert here.decide(id_, False).status_code == 200
    assert here.ended(turn)["state"] == "completed"


def test_a_chord_whose_keys_are_long_gone_is_completed_from_the_journal(here: Desk, key: str) -> None:
    turn = here.submit(wire(key), look(key))
    [id_] = here.waiting(turn)
    client = redis.Redis.from_url(here.server.url)
    try:
        gone = [name for name in client.scan_iter("celery-taskset-meta-*") if turn.encode() in name]
        assert gone
        client.delete(*gone)
    finally:
        client.close()
    assert here.decide(id_, True).status_code == 200
    assert here.ended(turn)["answer"] == "wired 5; looked"
    assert here.ledger.effects(f"{key} 5") == here.ledger.effects(f"look {key}") == 1


def test_an_istos_node_decides_and_another_of_our_processes_takes_over(here: Desk, key: str) -> None:
    from istos.agent.approval import decide_approval, list_approvals

    turns = [here.submit(wire(f"{key}{n}")) for n in range(2)]
    ids = [here.waiting(turn)[0] for turn in turns]
    token = KEYS[0]["key"]
    here.stack.add_replica("control")
    with istos_node(here.stack.mesh_endpoint, "operators") as node:
        seen: list[list[str]] = []

        def listed() -> list[str]:
            seen.append([one["id"] for one in node(lambda app: list_approvals(app, token=token)) if one["id"] in ids])
            return seen[-1]

        here.until(lambda: listed() == ids, "both, each once")
        assert node(lambda app: decide_approval(app, ids[0], approved=True, token=token))["decided_by"] == "ann"
        assert here.ended(turns[0])["state"] == "completed"
        here.stack["control"].kill()
        here.until(lambda: listed() == ids[1:], "the other process to answer")
        assert node(lambda app: decide_approval(app, ids[1], approved=False, note="no", token=token))["state"] == "denied"
    assert all(len(found) == len(set(found)) for found in seen), "no request twice, at whatever moment of the change"
    assert here.ended(turns[1])["calls"][0]["state"] == "denied"
    here.stack["control"].start().wait_ready()
    here.stack.remove("control-2")


def test_an_owner_that_changes_its_schema_meanwhile_is_not_asked_what_does_not_fit(here: Desk, key: str) -> None:
    turn = here.submit(wire(key))
    [id_] = here.waiting(turn)
    tools = here.stack["tools"]
    tools.env["DESK_SCHEMA"] = "strict"
    tools.restart()
    try:
        probe = here.submit(("desk-wire", {"key": key, "amount": 1, "iban": "x"}))
        here.until(lambda: here.turn(probe)["state"] == "waiting", "the new schema to be known")
        here.ask("POST", f"/v1/turns/{probe}/cancel")
        assert here.decide(id_, True).status_code == 200
        ended = here.ended(turn)
        # by whoever knows the new schema first: the worker, or the owner itself
        assert ended["calls"][0]["state"] == "failed"
        assert ended["calls"][0]["error"]["code"] in ("invalid_arguments", "validation_error")
        assert "iban" in ended["answer"] and not [line for line in here.ledger.lines("effects") if line.startswith(key)]
    finally:
        del tools.env["DESK_SCHEMA"]
        tools.restart()


def test_a_tool_host_that_is_gone_when_the_approval_comes(here: Desk, key: str) -> None:
    probe = here.submit(wire(key))  # the host may just have been started again
    here.waiting(probe)
    turn = here.submit(wire(key))
    [id_] = here.waiting(turn)
    here.stack["tools"].kill()
    try:
        assert here.decide(id_, True).status_code == 200
        ended = here.ended(turn)
        assert ended["state"] == "completed" and ended["calls"][0]["error"]["code"] == "not_found"
        assert "not_found" in ended["answer"] and here.ledger.effects(f"{key} 5") == 0
    finally:
        here.stack["tools"].start().wait_ready()


def test_everything_is_restarted_between_asking_and_deciding(here: Desk, key: str) -> None:
    """Last, since it stops all that the others stand on."""
    turn = here.submit(wire(f"{key}a"), look(key))
    other = here.submit(wire(f"{key}b"))
    late = here.submit(wire(f"{key}c"), agent="brief")
    [id_], [other_id], [late_id] = here.waiting(turn), here.waiting(other), here.waiting(late)
    asked, before, expires = here.ledger.lines("model"), here.approval(id_), here.approval(late_id)["expires_at"]
    names = [name for name in here.stack.names() if name != "mesh"]
    for name in names:
        here.stack[name].kill()
    here.stack["mesh"].kill()
    here.server.restart()
    while time.time() < _epoch(expires):
        time.sleep(0.05)  # the third one's time is up while nobody is there to see it
    for name in ["mesh", *names]:
        here.stack[name].start()
    for name in ["mesh", *names]:
        here.stack[name].wait_ready()
    after = here.approval(id_)
    assert after == before, "the same id, the same time to expire"
    listed = [one["approval_id"] for one in here.ask("GET", "/v1/approvals", params={"limit": 1000}).json()["approvals"]]
    assert id_ in listed and other_id in listed
    assert here.decide(id_, True).status_code == 200
    assert here.decide(other_id, False).status_code == 200
    assert here.ended(turn)["answer"] == "wired 5; looked"
    assert here.ended(other)["calls"][0]["state"] == "denied"
    assert here.ended(late)["calls"][0]["state"] == "expired" and here.decide(late_id, True).status_code == 410
    assert here.ledger.effects(f"{key}c 5") == 0
    assert here.ledger.effects(f"{key}a 5") == here.ledger.effects(f"look {key}") == 1 and here.ledger.effects(f"{key}b 5") == 0
    assert len(here.ledger.lines("model")) == len(asked) + 3, "each turn's model was asked for its answer and nothing else"
    told = [one["event"] for one in here.ask("GET", "/v1/audit", params={"approval_id": id_}).json()["entries"]]
    assert told == ["requested", "decided", "ran"]


def _epoch(rfc3339: str) -> float:
    return datetime.fromisoformat(rfc3339).timestamp()
