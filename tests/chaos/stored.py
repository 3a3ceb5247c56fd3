"""What Redis holds at the end of a chaos run: the turns, what was left behind, and a turn's journal as text for the report of a failure."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, cast

import redis

from orchestration.core.principal import DEVELOPER

TENANT = DEVELOPER.tenant

#: Keys that may stay for ever, or as long as something of theirs: all others must carry a time at which they go.
LASTING = re.compile(
    r"tm:(leases|claimed|due|leader:.*|[^:]+:(waiting|audit|aps.*))"  # the last two keep what their settings say
    r"|celery-taskset-meta-.*"  # looked at with what is left over
    r"|_kombu\..*|.*\.reply\.celery\.pidbox"  # Celery's own; it gives what a dead worker was answered no time to go
)


class Stored:
    """A reader of one Redis server's keys."""

    def __init__(self, url: str) -> None:
        self._redis = redis.Redis.from_url(url, decode_responses=True)

    def close(self) -> None:
        """Close the connection."""
        self._redis.close()

    def keys(self, pattern: str) -> list[str]:
        """The keys of a pattern."""
        return sorted(self._redis.scan_iter(pattern, count=1000))

    def turns(self) -> dict[str, dict[str, str]]:
        """The journals of all turns, by the turn's id."""
        found: dict[str, dict[str, str]] = {}
        for key in self.keys(f"tm:{TENANT}:turn:*"):
            if key.endswith(":steer"):
                continue
            fields = cast(dict[str, str], self._redis.hgetall(key))
            if "state" in fields:  # an input that joined a turn leaves which one it was
                found[key.rsplit(":", 1)[1]] = fields
        return found

    def hasten_callbacks(self) -> int:
        """Make it the time of every call to the outside that is still to be made or repeated; how many there are."""
        waiting = [entry for entry in cast(list[str], self._redis.zrange("tm:due", 0, -1)) if entry.startswith("out:")]
        if waiting:
            self._redis.zadd("tm:due", dict.fromkeys(waiting, 0), xx=True)
        return len(waiting)

    def name_of(self, turn_id: str) -> str:
        """What the turn's script calls itself."""
        request = json.loads(cast(str, self._redis.hget(f"tm:{TENANT}:turn:{turn_id}", "req")))
        return str(json.loads(request["input"])["name"])

    def frames(self, conversation_id: str) -> list[tuple[int, str, dict[str, Any]]]:
        """The stored frames of a conversation: number, turn, frame."""
        entries = cast(list[Any], self._redis.xrange(f"tm:{TENANT}:conv:{conversation_id}:frames"))
        return [(int(number.partition("-")[0]), fields["t"], json.loads(fields["f"])) for number, fields in entries]

    def leftovers(self, living_pids: Collection[int]) -> list[str]:
        """What should not be there when every turn has ended and every process lives."""
        left: list[str] = []

        def expect_none(what: str, found: Any) -> None:
            if found:
                left.append(f"{what}: {str(found)[:500]}")

        client = self._redis
        leases = cast(list[tuple[str, float]], client.zrange("tm:leases", 0, -1, withscores=True))
        expect_none("leases of dead processes", [name for name, _ in leases if int(name.split(".")[-2]) not in living_pids])
        expect_none("processes with two leases", len(leases) - len({name.rsplit(".", 1)[0] for name, _ in leases}))
        expect_none("running steps", {key: client.smembers(key) for key in self.keys("tm:run:*")})
        expect_none("deposed processes", client.smembers("tm:deposed"))
        expect_none("unsent steps", client.zrange("tm:unsent", 0, -1))
        for queue in ("plan", "tools", "control"):
            expect_none(f"steps sent to {queue} and not claimed", client.zrange(f"tm:sent:{queue}", 0, -1))
            expect_none(f"messages in {queue}", client.llen(queue))
        due = cast(list[str], client.zrange("tm:due", 0, -1))
        # what a late header may leave of the chord of an ended turn is looked for once more after a while
        chords_left = {entry.rpartition("/")[2] for entry in due if entry.startswith("chord:")}
        expect_none("due entries", [entry for entry in due if not entry.startswith("chord:")])
        for state in ("pending", "held"):
            expect_none(f"approvals that are {state}", client.zrange(f"tm:{TENANT}:aps:{state}", 0, -1))
        expect_none("mailbox entries", {key: client.lrange(key, 0, -1) for key in self.keys("tm:*:conv:*:mail")})
        expect_none("turns that count as waiting", int(client.get(f"tm:{TENANT}:waiting") or 0))
        expect_none("inputs that joined no plan", self.keys("tm:*:turn:*:steer"))
        expect_none("conversations with a running turn", [key for key in self._conversations() if client.hexists(key, "running")])
        chords = [key for key in self.keys("celery-taskset-meta-*") if key[len("celery-taskset-meta-") : -2] not in chords_left]
        # a chord's claim outlives its body by some minutes, so that a late duplicate is known as one
        expect_none("chord keys", [key for key in chords if not key.endswith(".c") or client.ttl(key) < 0])
        expect_none("unacknowledged messages", client.exists("unacked", "unacked_index"))
        return left

    def immortal(self) -> list[str]:
        """Keys that nothing will ever delete, besides those of `LASTING`."""
        return [key for key in self.keys("*") if self._redis.ttl(key) == -1 and not LASTING.fullmatch(key)]

    def journal(self, turn_id: str) -> str:
        """One turn's journal and frames, a line for each field."""
        fields = cast(dict[str, str], self._redis.hgetall(f"tm:{TENANT}:turn:{turn_id}"))
        lines = [f"--- journal of {turn_id}", *(f"{name} = {value[:400]}" for name, value in sorted(fields.items()))]
        if "conv" in fields:
            lines.append(f"--- its frames, in {fields['conv']}")
            lines.extend(
                f"{number} {json.dumps(frame, ensure_ascii=False)[:300]}"
                for number, turn, frame in self.frames(fields["conv"])
                if turn == turn_id
            )
        return "\n".join(lines)

    def _conversations(self) -> list[str]:
        return [key for key in self.keys(f"tm:{TENANT}:conv:*") if key.count(":") == 3]
