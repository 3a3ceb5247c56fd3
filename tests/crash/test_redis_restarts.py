"""Redis goes away and comes back, with its append-only file: everybody comes back by itself, and nothing is lost or done twice."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import httpx
import pytest

from tests.crash.conftest import Deployment

pytestmark = pytest.mark.slow

Deploy = Callable[..., Deployment]


def test_a_restart_with_steps_in_flight_loses_nothing(deploy: Deploy) -> None:
    here = deploy(workers=2)
    server = here.stack.redis
    watched: list[int] = []
    turns = [
        here.submit(f"t{i}", [("write", {"key": f"e{i}", "sleep_s": 1.0}), ("pay", {"key": f"p{i}"})], sleep_s=1.0, tokens=20, token_s=0.05)
        for i in range(6)
    ]

    def watch() -> None:
        last = ""
        while True:
            try:
                with here.http.stream("GET", f"/v1/turns/{turns[0]}/frames", headers={"Last-Event-ID": last} if last else {}) as stream:
                    if stream.status_code == 204:
                        return
                    for line in stream.iter_lines():
                        if line.startswith("data:"):
                            frame = json.loads(line[5:])
                            watched.append(frame["seq"])
                            last = str(frame["seq"])
                            if frame["kind"] == "done":
                                return
            except httpx.HTTPError:
                continue

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    here.until(lambda: here.ledger.asked("t0") == 1, "the model to be asked")
    for _ in range(2):
        server.kill()
        away = here.http.post("/v1/agents/ledger/turns", json={"input": json.dumps({"name": "away"})})
        assert away.status_code == 503 and away.headers["Retry-After"] and away.json()["code"] == "store_unavailable"
        server.start()
        here.until(lambda: here.http.get(f"/v1/turns/{turns[0]}").status_code == 200, "the gateway to be back")
    for i, turn in enumerate(turns):
        here.until(lambda turn=turn: any(call["name"] == "ledger-pay" for call in here.turn(turn)["calls"]), "the approval")
        approval = next(call["approval_id"] for call in here.turn(turn)["calls"] if "approval_id" in call)
        assert here.decide(approval).status_code == 200
        ended = here.ended(turn)
        assert ended["state"] == "completed" and [call["state"] for call in ended["calls"]] == ["completed", "completed"], i
        assert here.ledger.effects(f"e{i}") == here.ledger.effects(f"p{i}") == 1
        assert here.ledger.asked(f"t{i}") == 2, "no model call was repeated"
    watcher.join(60)
    stored = [frame["seq"] for frame in here.frames(turns[0])]
    assert watched == stored, "each frame once, in order, across the restarts"
    assert all(here.stack[name].running for name in here.stack.names()), "nobody had to be restarted"


def test_an_outage_longer_than_a_lease_repeats_no_model_call(deploy: Deploy) -> None:
    here = deploy(workers=1, TURNMILL_LEASE_S="1")
    turns = [here.submit(f"t{i}", sleep_s=6) for i in range(6)]
    here.until(lambda: all(here.ledger.asked(f"t{i}") == 1 for i in range(6)), "the model to be asked")
    server = here.stack.redis
    server.kill()
    here.until(lambda: here.stack["control"].log().count("the store does not answer") > 12, "the outage to last")
    server.start()
    for i, turn in enumerate(turns):
        assert here.ended(turn)["state"] == "completed"
        assert here.ledger.asked(f"t{i}") == 1


def test_idle_workers_take_steps_after_three_restarts(deploy: Deploy) -> None:
    here = deploy(workers=1)
    for _ in range(3):
        here.stack.redis.restart()
    here.until(lambda: here.http.get("/v1/approvals").status_code == 200, "the gateway to be back")
    turn = here.submit("after", [("write", {"key": "e"})])
    assert here.ended(turn)["state"] == "completed"
    assert here.stack["worker-2"].running and here.stack["control"].running
