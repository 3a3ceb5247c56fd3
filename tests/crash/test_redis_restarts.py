"""Redis goes away and comes back, with its append-only file: everybody comes back by itself, and nothing is lost or done twice."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import redis

from orchestration.testing.servers import RedisServer
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


def make_slow_to_load(server: RedisServer) -> None:
    """Give it so much that it answers "loading" for some seconds at each start."""
    pipe = redis.Redis.from_url(server.url).pipeline(transaction=False)
    for i in range(15_000):
        pipe.set(f"ballast:{i}", i)
    pipe.execute()
    server.options["key-load-delay"] = "200"


def loads_again(server: RedisServer) -> threading.Thread:
    """Kill it and start it again; the thread that waits until it has loaded."""
    server.kill()
    starting = threading.Thread(target=server.start)
    starting.start()
    return starting


def says_loading(server: RedisServer) -> bool:
    try:
        with redis.Redis.from_url(server.url) as client:
            client.ping()
    except redis.exceptions.BusyLoadingError:
        return True
    except redis.RedisError:
        pass
    return False


def test_while_redis_loads_its_data_everybody_waits(deploy: Deploy, tmp_path: Path) -> None:
    dumps = tmp_path / "tmp"
    dumps.mkdir()
    here = deploy(workers=1, TMPDIR=str(dumps))
    server = here.stack.redis
    make_slow_to_load(server)
    turns = [here.submit(f"t{i}", [("write", {"key": f"e{i}", "sleep_s": 2.0})], sleep_s=1.0) for i in range(4)]
    here.until(lambda: here.ledger.asked("t3") == 1, "the model to be asked")
    for _ in range(2):
        starting = loads_again(server)
        here.until(lambda: says_loading(server), "Redis to load")
        away = here.http.post("/v1/agents/ledger/turns", json={"input": json.dumps({"name": "away"})})
        assert away.status_code == 503 and away.headers["Retry-After"] and away.json()["code"] == "store_unavailable"
        starting.join()
    for i, turn in enumerate(turns):
        ended = here.ended(turn)
        assert ended["state"] == "completed" and ended["calls"][0]["state"] == "completed"
        assert here.ledger.effects(f"e{i}") == 1 and here.ledger.asked(f"t{i}") == 2
    assert all(here.stack[name].running for name in here.stack.names()), "nobody had to be restarted"
    assert list(dumps.iterdir()) == [], "no message was left in a file"


def test_who_starts_while_redis_loads_waits_for_it(deploy: Deploy) -> None:
    here = deploy()
    server = here.stack.redis
    make_slow_to_load(server)
    turn = here.submit("a", [("note", {"key": "e"})])
    for name in ("tools", "control", "gateway"):
        here.stack[name].stop()
    starting = loads_again(server)
    here.until(lambda: says_loading(server), "Redis to load")
    for name in ("tools", "control", "gateway"):
        here.stack[name].start()
    worker = here.worker()
    starting.join()
    for name in ("tools", "control", "gateway"):
        here.stack[name].wait_ready()
    assert here.ended(turn)["state"] == "completed" and here.ledger.effects("e") == 1
    assert worker.running and all(here.stack[name].running for name in here.stack.names())


def test_a_worker_survives_a_redis_that_loads_while_it_says_hello(here: Deployment, name: str, tmp_path: Path) -> None:
    worker = here.worker(CELERY_FAULT=f"mingle:{tmp_path / 'hello'}")
    assert (tmp_path / "hello").exists()
    assert here.ended(here.submit(name))["state"] == "completed" and worker.running


def test_a_redis_that_is_no_primary_for_a_while_is_waited_for(deploy: Deploy) -> None:
    here = deploy(workers=1, TURNMILL_LEASE_S="2")
    server = redis.Redis.from_url(here.stack.redis.url)
    turns = [here.submit(f"t{i}", [("write", {"key": f"e{i}", "sleep_s": 1.0})], sleep_s=1.0) for i in range(4)]
    here.until(lambda: here.ledger.asked("t3") == 1, "the model to be asked")
    for stale in ("yes", "no"):  # the first refuses writes only, the second everything
        server.config_set("replica-serve-stale-data", stale)
        server.replicaof("127.0.0.1", "1")
        for route in ("/v1/agents/ledger/turns", "/v1/turns/none/cancel")[: 1 if stale == "yes" else 2]:
            away = here.http.post(route, json={"input": json.dumps({"name": "away"})} if route.endswith("turns") else None)
            assert away.status_code == 503 and away.headers["Retry-After"], away.text
        before = here.stack["control"].log().count("the store")
        here.until(lambda before=before: here.stack["control"].log().count("the store") > before + 12, "it to last")
        server.replicaof("NO", "ONE")
        here.until(lambda: here.http.get("/v1/approvals").status_code == 200, "the gateway to be back")
    for i, turn in enumerate(turns):
        ended = here.ended(turn)
        assert ended["state"] == "completed" and ended["calls"][0]["state"] == "completed"
        assert here.ledger.effects(f"e{i}") == 1 and here.ledger.asked(f"t{i}") == 2
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
