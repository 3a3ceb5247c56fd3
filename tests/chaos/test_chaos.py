"""Everything is broken at random while a few hundred turns run, and at the end the books must be right.

`TURNMILL_CHAOS_SEED` repeats what was asked and what was broken; `TURNMILL_CHAOS_S` is for how many seconds things are broken.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import secrets
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orchestration.testing.parts import wait_until
from orchestration.testing.servers import RedisServer
from orchestration.testing.stack import Stack
from tests.chaos.evidence import Evidence, Fault
from tests.chaos.gateways import Gateways
from tests.chaos.hand import Hand, alarms, log_tails
from tests.chaos.people import People
from tests.chaos.receiver import SECRET, Call, Receiver
from tests.chaos.record import Record
from tests.chaos.stored import Stored
from tests.chaos.verdict import faults
from tests.chaos.workload import conversations
from tests.fixtures.ledger import Ledger

ROOT = Path(__file__).resolve().parents[2]

SECONDS = float(os.environ.get("TURNMILL_CHAOS_S") or 40)

#: Submissions for each second of breaking.
TURNS_PER_S = 5.0

#: Settings of the deployment, in seconds: leases short enough that many end in one run.
LEASE_S, LOST_AFTER_S, DRAIN_S, GATE_S, HOLD_AFTER_S = 4.0, 6.0, 3.0, 8.0, 2.0

#: For how long nothing may happen while something should, in seconds; not a measurement.
PATIENCE_S = 60.0

#: Turns whose journals a failure shows.
SHOWN = 4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 420)]


@dataclass(frozen=True, slots=True)
class Scene:
    """A deployment in which every kind of process but the hub and beat is there twice."""

    seed: int
    stack: Stack
    redis: RedisServer
    ledger: Ledger
    receiver: Receiver
    urls: tuple[str, ...]


@pytest.fixture
def scene(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Scene]:
    seed = int(os.environ.get("TURNMILL_CHAOS_SEED") or secrets.randbelow(2**32))
    with capsys.disabled():
        print(f"\nTURNMILL_CHAOS_SEED={seed} TURNMILL_CHAOS_S={SECONDS:g}", flush=True)
    directory = tmp_path / "ledger"
    directory.mkdir()
    (tmp_path / "tmp").mkdir()
    env = {
        "LEDGER_DIR": str(directory),
        "TMPDIR": str(tmp_path / "tmp"),  # kombu leaves a file at each lost connection with messages in hand
        "GATE_TIMEOUT_S": str(GATE_S),
        "HOLD_AFTER_S": str(HOLD_AFTER_S),
        "TURNMILL_CALLBACK_NETWORKS": "127.0.0.0/8",
        "TURNMILL_CALLBACK_SECRET": SECRET,
        "TURNMILL_LEASE_S": str(LEASE_S),
        "TURNMILL_LOST_AFTER_S": str(LOST_AFTER_S),
        "TURNMILL_DRAIN_S": str(DRAIN_S),
    }
    with RedisServer(appendonly="always") as redis, Receiver(seed) as receiver:
        processes = ("mesh", "tools", "worker", "control", "gateway", "beat")
        stack = Stack(
            "tests.chaos.agents",
            ["tests.fixtures.ledger_tools", "tests.chaos.tools"],
            processes=processes,
            redis=redis,
            env=env,
            threads=24,
            cwd=ROOT,
        )
        try:
            stack.start()
            with ThreadPoolExecutor() as pool:
                list(pool.map(stack.add_replica, ("tools", "worker", "control", "gateway")))
            urls = (stack.url, stack["gateway-2"].env["TURNMILL_PUBLIC_URL"])
            yield Scene(seed, stack, redis, Ledger(directory), receiver, urls)
        finally:
            stack.close()


def test_nothing_is_lost_and_nothing_happens_twice_whatever_dies(scene: Scene, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = Record()
    hand = Hand(scene.seed, scene.stack, scene.redis, record, lease_s=LEASE_S)
    stored = Stored(scene.redis.url)
    found: list[Fault] = []
    summary = "the run did not come to its end"
    try:
        evidence = asyncio.run(_run(scene, hand, record, stored))
        _keep(tmp_path, evidence)
        found = faults(evidence) + [Fault(what) for what in scene.receiver.faults]
        found += [Fault(f"left over: {what}") for what in _settled(scene, stored)]
        found += [Fault(f"logged: {line}") for line in alarms(scene.stack.directory)]
        found += [Fault(f"kept for ever: {key}") for key in stored.immortal()]
        summary = _summary(evidence, hand, found)
    except BaseException:
        found.append(Fault("the run itself failed"))
        raise
    finally:
        if found:
            report = _report(scene, record, stored, found, summary, tmp_path)
            print(report)
        stored.close()
        with capsys.disabled():
            print(summary, flush=True)
    assert not found, f"{len(found)} faults, the first: {found[0].what}\nto repeat it: {_command(scene)}"


async def _run(scene: Scene, hand: Hand, record: Record, stored: Stored) -> Evidence:
    """Break things while people talk, heal, wait for every turn's end, and gather what is known then."""
    async with Gateways(scene.urls, random.Random(f"{scene.seed}/gateways"), record) as gateways:
        people = People(scene.seed, gateways, record, scene.receiver.url)
        deciding = asyncio.create_task(people.decide())
        talking = asyncio.create_task(people.talk(conversations(scene.seed, turns=int(SECONDS * TURNS_PER_S), over_s=SECONDS * 0.8)))
        hand.start()
        await asyncio.sleep(SECONDS)  # the breaking itself: nothing is waited for here
        await asyncio.to_thread(hand.heal)
        gateways.patience_s = PATIENCE_S
        await asyncio.wait({talking}, timeout=2 * PATIENCE_S)
        if not talking.done():
            record.fault(f"conversations do not come to their end; {len(record.sent)} inputs were submitted")
            talking.cancel()
        await asyncio.gather(talking, return_exceptions=not talking.done())
        journals: dict[str, dict[str, str]] = {}
        open_turns: list[str] = []
        while not open_turns and journals.keys() != (found := await asyncio.to_thread(stored.turns)).keys():
            journals = found  # agents may be asked until the last turn has ended
            open_turns = await people.wait_for_ends(list(journals), patience_s=20.0 if record.faults else PATIENCE_S)
        await _told(stored, record)
        deciding.cancel()
        await asyncio.gather(deciding, return_exceptions=True)
        turns = {turn_id: await gateways.read(f"/v1/turns/{turn_id}") for turn_id in journals}
        names = {turn_id: await asyncio.to_thread(stored.name_of, turn_id) for turn_id in turns}
        known = sorted({turn["conversation_id"] for turn in turns.values()})
        goals = {name: (await gateways.read(f"/v1/conversations/{name}"))["last_seq"] for name in known}
        await people.see_the_end(goals, patience_s=5.0 if record.faults else PATIENCE_S)
        return Evidence(
            record=record,
            turns=turns,
            names=names,
            histories={name: (await gateways.read(f"/v1/conversations/{name}/history?limit=10000"))["history"] for name in known},
            parents={turn_id: fields["parent"].split()[0] for turn_id, fields in journals.items() if "parent" in fields},
            frames={name: await asyncio.to_thread(stored.frames, name) for name in known},
            effects=Counter(scene.ledger.lines("effects")),
            model_faults=scene.ledger.lines("faults"),
            open_turns=open_turns,
            calls=list(scene.receiver.calls),
        )


async def _told(stored: Stored, record: Record) -> None:
    """Wait until the receiver was told everything."""
    began = record.now_s
    while waiting := await asyncio.to_thread(stored.hasten_callbacks):
        if record.now_s - began > PATIENCE_S:
            record.fault(f"{waiting} callbacks are not made")
            return
        await asyncio.sleep(2.0)  # as long as one may take


def _keep(directory: Path, evidence: Evidence) -> None:
    """Write down what happened, also for a run without a fault: something may be odd that no promise forbids."""
    (directory / "turns.json").write_text(json.dumps(evidence.turns, indent=1))
    (directory / "story.txt").write_text("\n".join(evidence.record.story))


def _settled(scene: Scene, stored: Stored) -> list[str]:
    """What is left over once nothing changes any more."""
    pids = {scene.stack[name].pid for name in scene.stack.names()}
    with contextlib.suppress(TimeoutError):
        wait_until(lambda: not stored.leftovers(pids), "nothing is left over", PATIENCE_S)
    return stored.leftovers(pids)


def _summary(evidence: Evidence, hand: Hand, found: list[Fault]) -> str:
    turns = evidence.turns.values()
    calls = [call for turn in turns for call in turn["calls"]]
    failed = Counter(call["error"]["code"] for call in calls if call["state"] == "failed")
    record = evidence.record
    parts: dict[str, Any] = {
        "turns": dict(Counter(f"{turn['state']}/{turn['stop_reason']}" for turn in turns)),
        "calls": dict(Counter(call["state"] for call in calls)),
        "failed with": dict(failed),
        "doubtful": len(record.doubtful),
        "joined": sum(1 for one in record.accepted.values() if evidence.names.get(one.turn_id) != one.submission.name),
        "decided": len(record.decided),
        "reopened": len(record.reopened),
        "nested": len(evidence.parents),
        "called back": Counter(len(ids) for ids in _by_id(evidence).values()),
        "watches": len(record.watches),
        "channels": sum(1 for watch in record.watches if watch.agent),
        "connections": sum(watch.connections for watch in record.watches),
        "answers": dict(record.answers),
        "blows": hand.blows,
        "seconds": round(record.now_s, 1),
        "faults": len(found),
    }
    return " · ".join(f"{name} {value}" for name, value in parts.items())


def _command(scene: Scene) -> str:
    """What repeats a run."""
    return f"TURNMILL_CHAOS_SEED={scene.seed} TURNMILL_CHAOS_S={SECONDS:g} make chaos"


def _by_id(evidence: Evidence) -> dict[str, list[Call]]:
    """The calls to the receiver, by message."""
    found: dict[str, list[Call]] = {}
    for call in evidence.calls:
        found.setdefault(call.message_id, []).append(call)
    return found


def _report(scene: Scene, record: Record, stored: Stored, found: list[Fault], summary: str, directory: Path) -> str:
    """The faults with their evidence; the whole logs are kept in `directory`."""
    with contextlib.suppress(OSError):
        for log in scene.stack.directory.glob("*.log"):
            (directory / log.name).write_bytes(log.read_bytes())
    shown = list(dict.fromkeys(fault.turn_id for fault in found if fault.turn_id))
    parts = [
        f"to repeat it: {_command(scene)}; logs and journals in {directory}",
        summary,
        *(f"FAULT {fault.what} {f'[{fault.turn_id}]' if fault.turn_id else ''}" for fault in found),
        "--- what the hand did",
        *record.story,
    ]
    with contextlib.suppress(Exception):  # Redis may be what failed
        journals = {turn_id: stored.journal(turn_id) for turn_id in shown}
        (directory / "journals.txt").write_text("\n\n".join(journals.values()))
        parts += list(journals.values())[:SHOWN]
    (directory / "story.txt").write_text("\n".join(record.story))
    parts.append(log_tails(scene.stack.directory, lines=25))
    return "\n".join(parts)
