"""The people of the chaos run: they submit, decide, cancel and watch, and ask again where they got no answer."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from tests.chaos.channels import follow_over_channel
from tests.chaos.gateways import Gateways
from tests.chaos.record import Accepted, Decided, Record, Watch
from tests.chaos.watchers import follow
from tests.chaos.workload import HELD, KEY, Choice, Conversation, Submission, choice

ENDED = ("completed", "failed", "cancelled")

#: Pause between two looks at what waits for a decision, or at a turn, in seconds.
LOOK_S = 0.4

#: How long a request that was reopened may wait this time, in seconds.
REOPENED_S = 20.0


class People:
    """Everybody who talks to the deployment. One event loop. `callback_url` is who is told of turns that want it."""

    def __init__(self, seed: int, gateways: Gateways, record: Record, callback_url: str) -> None:
        self._seed = seed
        self._gateways = gateways
        self._record = record
        self._callback_url = callback_url
        self._chance = random.Random(f"{seed}/people")
        self._watching: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup

    async def talk(self, conversations: list[Conversation]) -> None:
        """Have all conversations; returns when everything was submitted, and what was to be cancelled was asked to be."""
        async with asyncio.TaskGroup() as self._group:
            for conversation in conversations:
                self._group.create_task(self._converse(conversation))

    async def decide(self) -> None:
        """Decide what waits and reopen what is held, for ever."""
        known: set[tuple[str, str, str]] = set()
        async with asyncio.TaskGroup() as group:
            while True:
                for state in ("pending", "held"):
                    answer = await self._gateways.ask("GET", f"/v1/approvals?state={state}&limit=1000")
                    assert answer is not None and answer.status_code == 200, answer
                    for approval in answer.json()["approvals"]:
                        # one that was reopened, or let go again, is to be seen to once more
                        seen = (approval["approval_id"], state, approval["expires_at"])
                        if seen not in known:
                            known.add(seen)
                            group.create_task(self._decide_one(approval) if state == "pending" else self._reopen(approval))
                await asyncio.sleep(LOOK_S)

    async def wait_for_ends(self, turn_ids: list[str], *, patience_s: float) -> list[str]:
        """Wait until these turns have ended; returns those that have not after `patience_s` seconds in which none did."""
        left = list(turn_ids)
        loop = asyncio.get_running_loop()
        limit = loop.time() + patience_s
        while left and loop.time() < limit:
            still = [turn_id for turn_id in left if not await self._has_ended(turn_id)]
            if len(still) < len(left):
                limit = loop.time() + patience_s
            left = still
            await asyncio.sleep(LOOK_S)
        return left

    async def see_the_end(self, goals: dict[str, int], *, patience_s: float) -> None:
        """Let the watchers see what is left: turns to their `done`, conversations to the number in `goals`; then send them home."""

        def content(watch: Watch) -> bool:
            return watch.done if watch.turn_id else watch.last >= goals.get(watch.conversation_id, 0)

        loop = asyncio.get_running_loop()
        limit = loop.time() + patience_s
        while loop.time() < limit and not all(content(watch) for watch in self._record.watches):
            await asyncio.sleep(0.2)
        turns = [task for task in self._watching if task.get_name() == "turn"]
        if turns:
            await asyncio.wait(turns, timeout=patience_s)
        for task in self._watching:
            task.cancel()
        results = await asyncio.gather(*self._watching, return_exceptions=True)
        self._record.faults.extend(f"a watcher failed: {result!r}" for result in results if isinstance(result, Exception))

    async def _converse(self, conversation: Conversation) -> None:
        await asyncio.sleep(conversation.begins_s)
        before: Accepted | None = None
        for submission in conversation.submissions:
            if submission.after_end and before is not None:
                while not await self._has_ended(before.turn_id):
                    await asyncio.sleep(LOOK_S)
            await asyncio.sleep(submission.pause_s)
            accepted = await self._submit(conversation, submission)
            if accepted is None:
                continue
            if before is None and conversation.watched:
                self._watch(Watch(conversation.conversation_id, agent=conversation.agent if conversation.over_socket else ""))
            before = accepted
            if submission.watched:
                self._watch(Watch(conversation.conversation_id, accepted.turn_id))
            if submission.cancel_after_s is not None:
                self._group.create_task(self._cancel(accepted.turn_id, submission.cancel_after_s))
            if submission.cancel_call_after_s is not None:
                self._group.create_task(self._cancel_call(accepted.turn_id, submission.cancel_call_after_s))

    def _watch(self, watch: Watch) -> None:
        self._record.watches.append(watch)
        task = asyncio.create_task(
            (follow_over_channel if watch.agent else follow)(self._gateways, self._record, watch, self._chance),
            name="turn" if watch.turn_id else "conversation",
        )
        self._watching.add(task)

    async def _submit(self, conversation: Conversation, submission: Submission) -> Accepted | None:
        conversation_id = conversation.conversation_id
        body: dict[str, Any] = {"input": json.dumps(submission.script), "conversation_id": conversation_id, "on_busy": submission.on_busy}
        if submission.deadline_s is not None:
            body["deadline_s"] = submission.deadline_s
        if submission.called_back:
            body["callback_url"] = self._callback_url
        headers = {"Idempotency-Key": submission.name} if submission.keyed else {}
        if submission.wait_s:
            headers["Prefer"] = f"wait={submission.wait_s}"
        self._record.sent.append((conversation_id, submission))
        path = f"/v1/agents/{conversation.agent}/turns"
        answer = await self._gateways.ask("POST", path, body=body, headers=headers, once=not submission.keyed)
        if answer is None:
            self._record.doubtful.add(submission.name)
            return None
        if answer.status_code in (200, 202):
            accepted = Accepted(submission, conversation_id, answer.json()["turn_id"])
            self._record.accepted[submission.name] = accepted
            return accepted
        if answer.status_code == 409 and submission.on_busy == "reject" and answer.json()["code"] == "conversation_busy":
            self._record.rejected.add(submission.name)
        else:
            self._record.fault(f"submission {submission.name} was answered with {answer.status_code}: {answer.text[:300]}")
        return None

    async def _has_ended(self, turn_id: str) -> bool:
        answer = await self._gateways.ask("GET", f"/v1/turns/{turn_id}")
        assert answer is not None
        if answer.status_code != 200:
            self._record.fault(f"turn {turn_id} was accepted, and reading it is answered with {answer.status_code}")
            return True
        return answer.json()["state"] in ENDED

    async def _cancel(self, turn_id: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self._record.cancel_wished.add(turn_id)
        answer = await self._gateways.ask("POST", f"/v1/turns/{turn_id}/cancel")
        assert answer is not None
        if answer.status_code == 200:
            self._record.cancelled.add(turn_id)
        elif answer.status_code != 409 or answer.json()["code"] != "turn_ended":
            self._record.fault(f"cancel of turn {turn_id} was answered with {answer.status_code}: {answer.text[:300]}")

    async def _cancel_call(self, turn_id: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        turn = await self._gateways.read(f"/v1/turns/{turn_id}")
        if not turn["calls"]:
            return
        call_id = self._chance.choice(turn["calls"])["call_id"]
        answer = await self._gateways.ask("POST", f"/v1/turns/{turn_id}/calls/{call_id}/cancel")
        assert answer is not None
        if answer.status_code == 200:
            self._record.calls_cancelled.add(call_id)
        elif answer.status_code != 409 or answer.json()["code"] != "call_ended":
            self._record.fault(f"cancel of call {call_id} was answered with {answer.status_code}: {answer.text[:300]}")

    async def _decide_one(self, approval: dict[str, Any]) -> None:
        wanted: Choice = choice(self._seed, approval["arguments"][KEY], held=approval["tool"].endswith(HELD))
        if wanted.approved is None or (wanted.late and not self._record.reopened[approval["approval_id"]]):
            return
        await asyncio.sleep(wanted.after_s)
        opinions = [wanted.approved, not wanted.approved] if wanted.contested else [wanted.approved]
        await asyncio.gather(*(self._say(approval, opinion, edited=wanted.edited and opinion) for opinion in opinions))

    async def _reopen(self, approval: dict[str, Any]) -> None:
        approval_id = approval["approval_id"]
        await asyncio.sleep(self._chance.uniform(0, 1))
        self._record.reopened[approval_id] += 1
        answer = await self._gateways.ask("POST", f"/v1/approvals/{approval_id}/reopen", body={"timeout_s": REOPENED_S})
        assert answer is not None
        # it may have been reopened by a request whose answer got lost, or its turn be over
        if answer.status_code not in (200, 409, 410):
            self._record.fault(f"reopening {approval_id} was answered with {answer.status_code}: {answer.text[:300]}")

    async def _say(self, approval: dict[str, Any], approved: bool, *, edited: bool) -> None:
        approval_id, arguments = approval["approval_id"], dict(approval["arguments"])
        body: dict[str, Any] = {"approved": approved}
        if edited:
            arguments[KEY] += ".edited"
            body["arguments"] = arguments
        answer = await self._gateways.ask("POST", f"/v1/approvals/{approval_id}/decision", body=body)
        assert answer is not None
        if answer.status_code == 200:
            self._record.decided.setdefault(approval_id, []).append(Decided(approved, arguments))
        elif answer.status_code not in (409, 410):
            self._record.fault(f"a decision about {approval_id} was answered with {answer.status_code}: {answer.text[:300]}")
