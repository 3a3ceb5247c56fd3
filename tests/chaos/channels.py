"""Watchers of the chaos run that follow a conversation over a channel, and come back with the last number they saw."""

from __future__ import annotations

import json
import random
from urllib.parse import urlencode

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage

from tests.chaos.gateways import SILENCE_S, Gateways
from tests.chaos.record import Record, Seen, Watch

#: Frames without a number that a channel may send: its first one, and why it ends.
ENDS_WITH = ("store_unavailable", "slow_consumer")


async def follow_over_channel(gateways: Gateways, record: Record, watch: Watch, chance: random.Random) -> None:
    """Follow a conversation for ever."""
    while True:
        query = urlencode({"conversation_id": watch.conversation_id, "after": watch.last})
        url = f"{str(gateways.any().base_url).replace('http', 'ws', 1).rstrip('/')}/v1/agents/{watch.agent}/channel?{query}"
        # now and then a watcher goes away by itself in the middle of a turn
        patience = chance.randint(1, 25) if chance.random() < 0.3 else 1_000_000
        try:
            async with connect(url, open_timeout=SILENCE_S, ping_timeout=SILENCE_S, proxy=None) as socket:
                watch.connections += 1
                for _ in range(patience):
                    _take(record, watch, json.loads(await socket.recv()))
        except (OSError, ConnectionClosed, InvalidHandshake, InvalidMessage):  # TimeoutError is an OSError
            record.answers["channel cut off"] += 1
        await gateways.pause()


def _take(record: Record, watch: Watch, frame: dict[str, object]) -> None:
    number = frame.get("seq")
    if isinstance(number, int):
        watch.frames.append(Seen(number, str(frame["kind"]), frame))
    elif frame["kind"] != "channel" and frame.get("code") not in ENDS_WITH:
        record.fault(f"a channel of {watch.conversation_id} was told {frame}")
