"""A worker that is told to stop: it takes nothing new, finishes or hands on what runs, and no turn notices more than a pause."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import httpx
import pytest

from tests.crash.conftest import Deployment

pytestmark = pytest.mark.slow


def test_a_graceful_stop_lets_running_steps_finish(here: Deployment, name: str) -> None:
    first = here.worker()
    turn = here.submit(name, [("write", {"key": name, "sleep_s": 1.0})], sleep_s=0.5)
    here.until(lambda: here.ledger.asked(name) == 1, "the model to be asked")
    second = here.worker()
    first.terminate()
    ended = here.ended(turn)
    assert ended["state"] == "completed" and ended["calls"][0]["state"] == "completed"
    assert here.ledger.effects(name) == 1 and here.ledger.asked(name) == 2, "nothing ran twice"
    here.until(lambda: not first.running, "the stopped worker to leave")
    assert second.running


def test_what_does_not_finish_in_time_is_handed_on(here: Deployment, name: str) -> None:
    first = here.worker(TURNMILL_DRAIN_S="0.5")
    turn = here.submit(name, sleep_s=6)
    here.until(lambda: here.ledger.asked(name) == 1, "the model to be asked")
    here.worker()
    first.terminate()
    here.until(lambda: not first.running, "the stopped worker to leave")
    here.until(lambda: here.ledger.asked(name) == 2, "the other worker to ask the model")
    assert here.ended(turn)["state"] == "completed"


def test_a_rolling_restart_loses_and_doubles_nothing(here: Deployment, name: str) -> None:
    workers = [here.worker(), here.worker()]
    turns = [here.submit(f"{name}.{i}", [("write", {"key": f"{name}.{i}", "sleep_s": 0.1})], sleep_s=0.1) for i in range(30)]
    for worker in workers:
        worker.terminate()
        here.until(lambda worker=worker: not worker.running, "a worker to leave")
        here.worker()
    for i, turn in enumerate(turns):
        ended = here.ended(turn)
        assert ended["state"] == "completed" and ended["calls"][0]["state"] == "completed"
        assert here.ledger.effects(f"{name}.{i}") == 1 and here.ledger.asked(f"{name}.{i}") == 2


def test_a_deploy_of_every_process_loses_and_doubles_nothing(deploy: Callable[..., Deployment]) -> None:
    here = deploy(workers=1)
    turns: list[tuple[str, str]] = []
    stop = threading.Event()

    def submit() -> None:
        for number in itertools.takewhile(lambda _: not stop.is_set(), itertools.count()):
            name = f"t{number}"
            with suppress(httpx.HTTPError):  # the gateway is being replaced; with several behind a balancer nobody would see it
                turns.append((name, here.submit(name, [("write", {"key": name, "sleep_s": 0.2})], sleep_s=0.2)))
            time.sleep(0.3)

    people = threading.Thread(target=submit)
    people.start()
    here.until(lambda: len(turns) > 3, "turns to be under way")
    gated = here.submit("gated", [("pay", {"key": "gated"})])
    approval = here.waiting_approval(gated)
    for name, old in (("tools", "tools"), ("control", "control"), ("worker", "worker-2"), ("gateway", "gateway")):
        if name == "gateway":
            here.stack["gateway"].restart()
            continue
        here.stack.add_replica(name)
        here.stack[old].terminate()
        here.until(lambda old=old: not here.stack[old].running, f"{old} to leave")
        assert here.stack[old].status == 0
    seen = len(turns)
    here.until(lambda: len(turns) > seen + 3, "turns to go on")
    stop.set()
    people.join()
    assert here.decide(approval["approval_id"]).status_code == 200
    assert here.ended(gated)["state"] == "completed" and here.ledger.effects("gated") == 1
    for name, turn in turns:
        ended = here.ended(turn)
        assert ended["state"] == "completed" and [call["state"] for call in ended["calls"]] == ["completed"], name
        assert here.ledger.effects(name) == 1 and here.ledger.asked(name) == 2
