"""A process that sleeps past its lease and wakes up again: what it still does counts for nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.conftest import Deployment

pytestmark = pytest.mark.slow

Deploy = Callable[..., Deployment]


def test_a_zombie_commits_and_sends_nothing(deploy: Deploy, tmp_path: Path) -> None:
    here = deploy(TURNMILL_LEASE_S="2")
    zombie = here.worker(fault=f"replied:plan:stop:{tmp_path / 'once'}")
    turn = here.submit("a", [("write", {"key": "e"})])
    here.until(lambda: (tmp_path / "once").exists(), "the worker to stop")
    here.worker()
    ended = here.ended(turn)
    frames = here.frames(turn)
    zombie.resume()
    here.until(lambda: "taken for dead" in zombie.log(), "the zombie to notice")
    assert here.turn(turn) == ended and here.frames(turn) == frames
    assert here.ledger.effects("e") == 1
    assert ended["calls"][0]["state"] == "completed"
    again = here.ended(here.submit("b", [("write", {"key": "f"})]))
    assert again["state"] == "completed", "the one that slept works again under a new lease"


def test_a_zombie_between_claim_and_query_does_not_ask(deploy: Deploy, tmp_path: Path) -> None:
    here = deploy(TURNMILL_LEASE_S="2")
    zombie = here.worker(fault=f"claimed:tool:stop:{tmp_path / 'once'}")
    turn = here.submit("a", [("write", {"key": "e"})])
    here.until(lambda: (tmp_path / "once").exists(), "the worker to stop")
    here.worker()
    ended = here.ended(turn)
    assert ended["calls"][0]["state"] == "unknown_outcome"
    zombie.resume()
    here.until(lambda: "taken for dead" in zombie.log(), "the zombie to notice")
    here.ended(here.submit("b", [("note", {"key": "f"})]))
    assert here.ledger.effects("e") == 0


def test_a_query_that_comes_too_late_is_refused_by_the_host(deploy: Deploy, tmp_path: Path) -> None:
    here = deploy(TURNMILL_LEASE_S="2")
    zombie = here.worker(fault=f"deadline_checked:tool:stop:{tmp_path / 'once'}")
    turn = here.submit("a", [("write", {"key": "e"})])
    here.until(lambda: (tmp_path / "once").exists(), "the worker to stop")
    here.worker()
    assert here.ended(turn)["calls"][0]["state"] == "unknown_outcome"
    zombie.resume()
    here.until(lambda: "taken for dead" in zombie.log(), "the zombie to notice")
    here.ended(here.submit("b", [("note", {"key": "f"})]))
    assert here.ledger.effects("e") == 0, "its query carried a time after which the host refuses it"
