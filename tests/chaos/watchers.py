"""Watchers of the chaos run: they follow a turn or a conversation over server-sent events and come back with the last number they saw."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator

import httpx

from tests.chaos.gateways import Gateways
from tests.chaos.record import Record, Seen, Watch


async def follow(gateways: Gateways, record: Record, watch: Watch, chance: random.Random) -> None:
    """Follow until `done`, and then come back once more, which must be answered with 204; a conversation is followed for ever."""
    path = f"/v1/turns/{watch.turn_id}/frames" if watch.turn_id else f"/v1/conversations/{watch.conversation_id}/frames"
    while True:
        headers = {"Last-Event-ID": str(watch.last)} if watch.last else {}
        # now and then a watcher goes away by itself in the middle of a turn
        patience = chance.randint(1, 25) if chance.random() < 0.3 else None
        try:
            async with gateways.any().stream("GET", path, headers=headers) as answer:
                if answer.status_code == 204 and watch.done:
                    return
                if answer.status_code == 200:
                    watch.connections += 1
                    await _take(answer, watch, patience)
                elif answer.status_code != 503:
                    record.fault(f"a watcher was answered with {answer.status_code}: {path} after {watch.last}")
                    return
        except httpx.TransportError:
            record.answers["watcher cut off"] += 1
        await gateways.pause()


async def _take(answer: httpx.Response, watch: Watch, patience: int | None) -> None:
    taken = 0
    async for frame in _events(answer):
        watch.frames.append(frame)
        taken += 1
        if patience is not None and taken >= patience:
            return


async def _events(answer: httpx.Response) -> AsyncIterator[Seen]:
    """The events of a stream; one that the connection's end cut in two does not count."""
    number, event, data = 0, "", ""
    async for line in answer.aiter_lines():
        if line:
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "id":
                number = int(value)
            elif field == "event":
                event = value
            elif field == "data":
                data += value
        elif data:
            yield Seen(number, event, json.loads(data))
            number, event, data = 0, "", ""
