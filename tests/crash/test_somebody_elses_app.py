"""Turns in somebody else's Celery project: its app, its routing and its workers run them, and its own tasks go on beside them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from orchestration.testing.servers import redis_server
from orchestration.testing.stack import Stack
from tests.crash.conftest import Deployment, started
from tests.fixtures.ledger import Ledger

pytestmark = pytest.mark.slow

HOST = """
import os
from celery import Celery

app = Celery("host", broker=os.environ["TURNMILL_REDIS_URL"], backend=os.environ["TURNMILL_REDIS_URL"])
app.conf.update(
    task_default_queue="host",
    task_routes={"turn.*": {"queue": "agents"}, "approval.*": {"queue": "agents"}, "outbound.*": {"queue": "agents"}},
    result_chord_expires=0,
)

import workers.tasks  # noqa: E402,F401


@app.task
def double(number):
    return 2 * number
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    tmp_path = tmp_path_factory.mktemp("host")
    directory = tmp_path / "ledger"
    directory.mkdir()
    (tmp_path / "hostapp.py").write_text(HOST)
    (tmp_path / "broken.py").write_text(HOST.replace("result_chord_expires=0", "result_chord_expires=60"))
    with redis_server() as server:
        stack = Stack(
            "tests.fixtures.ledger_agents",
            ["tests.fixtures.ledger_tools"],
            processes=("mesh", "tools", "gateway"),
            redis=server,
            env={"LEDGER_DIR": str(directory), "TURNMILL_CELERY_APP": "hostapp:app", "PYTHONPATH": f"{tmp_path}:{Path.cwd()}"},
        )
        deployment = started(stack, Ledger(directory))
        command = ["celery", "-A", "hostapp", "worker", "-Q", "host,agents", "-P", "threads", "-c", "8", "--loglevel", "INFO"]
        stack.add("host", command, ready=lambda log: re.search(r" ready\.$", log, re.MULTILINE) is not None)
        yield deployment
        deployment.http.close()
        stack.close()


def test_an_existing_app_runs_turns_with_its_own_routing(host: Deployment) -> None:
    turn = host.submit("a", [("write", {"key": "e"}), ("pay", {"key": "p"})])
    assert host.decide(host.waiting_approval(turn)["approval_id"]).status_code == 200
    ended = host.ended(turn)
    assert ended["state"] == "completed" and host.ledger.effects("e") == host.ledger.effects("p") == 1
    store = redis.Redis.from_url(host.stack.redis.url, decode_responses=True)
    assert not any(store.exists(queue) for queue in ("plan", "tools", "control")), "nothing went to queues that are not the host's"
    store.close()


def test_the_hosts_own_tasks_go_on(host: Deployment) -> None:
    asked = host.stack.run("python", "-c", "from hostapp import app, double; print(double.delay(21).get(timeout=30))")
    assert asked.stdout.strip() == "42", asked.stderr


def test_a_host_on_which_chords_cannot_work_is_refused(host: Deployment) -> None:
    refused = host.stack.run("celery", "-A", "broken", "worker", "-Q", "agents", "-P", "threads", timeout_s=30)
    assert refused.returncode != 0 and "result_chord_expires" in refused.stderr
