"""Watchers over a real Redis: each frame once and in order, whatever happens in between."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing
from typing import Any

import pytest
from gateway_stage import Hand

from orchestration.actions.follow import follow_conversation, follow_turn, wait_for_end
from orchestration.actions.read import TurnPlace
from orchestration.core.frames import FrameKind, frame
from orchestration.state.frame_hub import FrameHub
from orchestration.state.watcher import Frame, Watcher
from orchestration.testing.servers import RedisServer


@pytest.fixture
def hand(turnmill_redis: RedisServer) -> Iterator[Hand]:
    made = Hand(turnmill_redis.url, tenant="frames")
    made.redis.flushdb()
    yield made
    made.close()


def with_hub(url: str, body: Callable[[FrameHub], Coroutine[Any, Any, None]], **options: int) -> None:
    async def run() -> None:
        hub = FrameHub(url, **options)
        await hub.start()
        try:
            async with asyncio.timeout(60):
                await body(hub)
        finally:
            await hub.close()

    asyncio.run(run())


async def take(watcher: Watcher, count: int) -> list[Frame]:
    taken: list[Frame] = []
    while len(taken) < count:
        ready = await watcher.next(1.0)
        if ready is not None:
            taken.append(ready)
        assert not watcher.over
    return taken


async def eventually(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def placed(place: TurnPlace) -> Callable[[], Awaitable[TurnPlace]]:
    async def locate() -> TurnPlace:
        return place

    return locate


async def still_there() -> object:
    return None


async def all_of(frames: Any) -> list[Frame]:
    async with aclosing(frames):
        return [ready async for ready in frames if ready is not None]


def test_watchers_who_come_while_frames_are_written_get_each_once_and_in_order(turnmill_redis: RedisServer, hand: Hand) -> None:
    count = 1500

    def write() -> None:
        for number in range(count):
            hand.write("cv_a", "tn_a", str(number))

    async def body(hub: FrameHub) -> None:
        async def one(delay: float) -> list[str]:
            await asyncio.sleep(delay)
            async with hub.watch("frames", "cv_a", after=0) as watcher:
                taken = await take(watcher, count)
                seqs = [ready.seq for ready in taken]
                assert seqs == sorted(set(seqs))
                return [json.loads(ready.text)["text"] for ready in taken]

        writer = threading.Thread(target=write)
        writer.start()
        heard = await asyncio.gather(*(one(0.02 * place) for place in range(12)))
        writer.join()
        assert all(texts == [str(number) for number in range(count)] for texts in heard)

    with_hub(turnmill_redis.url, body)


def test_a_returning_watcher_gets_the_rest_and_nothing_again(turnmill_redis: RedisServer, hand: Hand) -> None:
    numbers = [hand.write("cv_b", "tn_b", str(place)) for place in range(50)]

    async def body(hub: FrameHub) -> None:
        async with hub.watch("frames", "cv_b", after=numbers[19]) as watcher:
            rest = await take(watcher, 30)
            assert [ready.seq for ready in rest] == numbers[20:]
            live = await asyncio.to_thread(hand.write, "cv_b", "tn_b", "live")
            assert [ready.seq for ready in await take(watcher, 1)] == [live]

    with_hub(turnmill_redis.url, body)


def test_all_watchers_share_one_connection_and_leave_no_subscription_behind(turnmill_redis: RedisServer, hand: Hand) -> None:
    def subscribers() -> int:
        return sum(1 for client in hand.redis.client_list() if int(client["sub"]) > 0)

    async def body(hub: FrameHub) -> None:
        async def one(place: int) -> None:
            async with hub.watch("frames", f"cv_{place % 20}", after=0) as watcher:
                await take(watcher, 1)
                assert subscribers() == 1

        for place in range(20):
            hand.write(f"cv_{place}", "tn_x", "here")
        await asyncio.gather(*(one(place) for place in range(100)))
        assert (hub.watching, hub.channels) == (0, 0)
        await eventually(lambda: not hand.redis.pubsub_channels("tm:frames:*"))

    with_hub(turnmill_redis.url, body)


def test_a_watcher_that_comes_and_goes_at_once_does_not_deafen_the_next(turnmill_redis: RedisServer, hand: Hand) -> None:
    async def body(hub: FrameHub) -> None:
        for place in range(50):
            async with hub.watch("frames", "cv_c", after=0):
                pass
            async with hub.watch("frames", "cv_c", after=0) as watcher:
                if place:
                    await take(watcher, place)
                await asyncio.to_thread(hand.write, "cv_c", "tn_c", str(place))
                assert json.loads((await take(watcher, 1))[0].text)["text"] == str(place)

    with_hub(turnmill_redis.url, body)


def test_a_frame_whose_publishing_was_lost_is_found_in_the_stream(turnmill_redis: RedisServer, hand: Hand) -> None:
    async def body(hub: FrameHub) -> None:
        async with hub.watch("frames", "cv_d", after=0) as watcher:
            first = await asyncio.to_thread(hand.write, "cv_d", "tn_d", "heard")
            assert (await take(watcher, 1))[0].seq == first
            unheard = hand.write("cv_d", "tn_d", "unheard", publish=False)
            assert await watcher.next(0.05) is None or watcher.position == unheard
            if watcher.position != unheard:
                assert (await take(watcher, 1))[0].seq == unheard

    with_hub(turnmill_redis.url, body)


def test_a_watcher_that_does_not_read_is_cut_off_and_can_come_back(turnmill_redis: RedisServer, hand: Hand) -> None:
    async def body(hub: FrameHub) -> None:
        async with hub.watch("frames", "cv_e", after=0) as watcher:
            hand.write("cv_e", "tn_e", "first")
            await take(watcher, 1)
            await asyncio.to_thread(lambda: [hand.write("cv_e", "tn_e", str(place)) for place in range(200)])
            await eventually(lambda: watcher.over)
            last_seen = watcher.position
            told = await watcher.next(1)
            assert told is not None
            assert (told.seq, told.kind, json.loads(told.text)["code"]) == (0, "error", "slow_consumer")
            assert await watcher.next(1) is None
        async with hub.watch("frames", "cv_e", after=last_seen) as watcher:
            assert [json.loads(ready.text)["text"] for ready in await take(watcher, 200)] == [str(place) for place in range(200)]

    with_hub(turnmill_redis.url, body, queue_frames=100)


def test_large_frames_count_by_their_size(turnmill_redis: RedisServer, hand: Hand) -> None:
    async def body(hub: FrameHub) -> None:
        async with hub.watch("frames", "cv_f", after=0) as watcher:
            hand.write("cv_f", "tn_f", "first")
            await take(watcher, 1)
            await asyncio.to_thread(lambda: [hand.write("cv_f", "tn_f", "x" * 40_000) for _ in range(4)])
            await eventually(lambda: watcher.over)

    with_hub(turnmill_redis.url, body, queue_bytes=100_000)


def test_a_slow_reader_of_a_long_backlog_is_not_cut_off(turnmill_redis: RedisServer, hand: Hand) -> None:
    for place in range(300):
        hand.write("cv_g", "tn_g", str(place))

    async def body(hub: FrameHub) -> None:
        async with hub.watch("frames", "cv_g", after=0) as watcher:
            texts = [json.loads((await take(watcher, 1))[0].text)["text"]]
            await asyncio.to_thread(lambda: [hand.write("cv_g", "tn_g", str(place)) for place in range(300, 600)])
            texts += [json.loads(ready.text)["text"] for ready in await take(watcher, 599)]
            assert texts == [str(place) for place in range(600)]

    with_hub(turnmill_redis.url, body, queue_frames=50)


def test_a_restart_of_redis_is_bridged() -> None:
    with RedisServer(appendonly="always") as server:
        hand = Hand(server.url, tenant="frames")
        written: list[int] = []
        stop = threading.Event()

        def write() -> None:
            # What Redis acknowledged is what watchers must get; a write in the middle of the restart may or may not count.
            while not stop.is_set():
                try:
                    written.append(hand.write("cv_r", "tn_r", str(len(written))))
                except (OSError, RuntimeError, Exception) as error:
                    assert "Connection" in type(error).__name__ or "Busy" in type(error).__name__, error
                stop.wait(0.002)

        async def body(hub: FrameHub) -> None:
            async with hub.watch("frames", "cv_r", after=0) as first, hub.watch("frames", "cv_r", after=0) as second:
                writer = threading.Thread(target=write)
                writer.start()
                got = [await take(first, 20), await take(second, 20)]
                await asyncio.to_thread(server.restart)
                target = len(written) + 50
                await eventually(lambda: len(written) > target)
                stop.set()
                writer.join()
                for watcher, taken in ((first, got[0]), (second, got[1])):
                    while taken[-1].seq < written[-1]:
                        ready = await watcher.next(1.0)
                        if ready is not None:
                            taken.append(ready)
                    seqs = [ready.seq for ready in taken]
                    assert seqs == sorted(set(seqs))
                    assert set(written) <= set(seqs)
                    assert all(ready.kind == "token" for ready in taken)

        try:
            with_hub(server.url, body)
        finally:
            stop.set()
            hand.close()


def test_a_hub_that_starts_before_redis_serves_once_it_is_there() -> None:
    with RedisServer(appendonly="always") as server:
        hand = Hand(server.url, tenant="frames")
        number = hand.write("cv_s", "tn_s", "kept")
        server.shut_down()

        async def body(hub: FrameHub) -> None:
            async with hub.watch("frames", "cv_s", after=0) as watcher:
                assert await watcher.next(0.2) is None
                await asyncio.to_thread(server.start)
                assert (await take(watcher, 1))[0].seq == number

        with_hub(server.url, body)
        hand.close()


def test_a_turn_is_followed_to_its_done_and_no_further(turnmill_redis: RedisServer, hand: Hand) -> None:
    first = hand.write("cv_h", "tn_h", "one")
    hand.write("cv_h", "tn_other", "not ours")
    last = hand.put("cv_h", "tn_h", frame(FrameKind.DONE, "tn_h", stop_reason="answer"))
    hand.write("cv_h", "tn_other", "later")
    place = TurnPlace("cv_h", first, last, True)

    async def body(hub: FrameHub) -> None:
        frames = await follow_turn(hub, "frames", "tn_h", placed(place), None)
        assert [(ready.seq, ready.kind) for ready in await all_of(frames)] == [(first, "token"), (last, "done")]
        frames = await follow_turn(hub, "frames", "tn_h", placed(place), first)
        assert [ready.seq for ready in await all_of(frames)] == [last]
        assert await follow_turn(hub, "frames", "tn_h", placed(place), last) is None

    with_hub(turnmill_redis.url, body)


def test_a_number_above_the_last_given_out_gets_a_gap_and_then_the_end(turnmill_redis: RedisServer, hand: Hand) -> None:
    first = hand.write("cv_i", "tn_i", "one")
    last = hand.put("cv_i", "tn_i", frame(FrameKind.DONE, "tn_i", stop_reason="answer"))
    beyond = last + 10**9

    async def body(hub: FrameHub) -> None:
        frames = await follow_turn(hub, "frames", "tn_i", placed(TurnPlace("cv_i", first, last, True)), beyond)
        told, done = await all_of(frames)
        assert (told.seq, json.loads(told.text)) == (0, {"kind": "gap", "from": last + 1, "to": beyond, "turn_id": "tn_i"})
        assert (done.seq, done.kind) == (last, "done")
        live = await follow_conversation(hub, "frames", "cv_i", still_there, beyond)
        async with aclosing(live):
            told = await anext(live)
            assert told is not None and json.loads(told.text) == {"kind": "gap", "from": last + 1, "to": beyond}
            number = await asyncio.to_thread(hand.write, "cv_i", "tn_next", "goes on")
            ready = await anext(live)
            assert ready is not None and ready.seq == number

    with_hub(turnmill_redis.url, body)


def test_frames_that_are_no_longer_kept_are_told_as_a_gap(turnmill_redis: RedisServer, hand: Hand) -> None:
    numbers = [hand.write("cv_j", "tn_j", str(place)) for place in range(10)]
    last = hand.put("cv_j", "tn_j", frame(FrameKind.DONE, "tn_j", stop_reason="answer"))
    hand.redis.xtrim(f"{hand.key('cv_j')}:frames", minid=f"{numbers[6]}-0", approximate=False)
    place = TurnPlace("cv_j", numbers[0], last, True)

    async def body(hub: FrameHub) -> None:
        for after, start in ((numbers[2], numbers[2]), (None, numbers[0] - 1)):
            frames = await follow_turn(hub, "frames", "tn_j", placed(place), after)
            told, *rest = await all_of(frames)
            assert (told.seq, json.loads(told.text)["from"], json.loads(told.text)["to"]) == (0, start + 1, numbers[6] - 1)
            assert [ready.seq for ready in rest] == [*numbers[6:], last]
        frames = await follow_turn(hub, "frames", "tn_j", placed(place), numbers[6])
        assert [ready.seq for ready in await all_of(frames)] == [*numbers[7:], last]

    with_hub(turnmill_redis.url, body)


def test_an_ended_turn_whose_frames_are_all_gone_says_so_and_ends(turnmill_redis: RedisServer, hand: Hand) -> None:
    first = hand.write("cv_k", "tn_k", "one")
    last = hand.put("cv_k", "tn_k", frame(FrameKind.DONE, "tn_k", stop_reason="answer"))
    place = TurnPlace("cv_k", first, last, True)

    async def body(hub: FrameHub) -> None:
        hand.redis.xtrim(f"{hand.key('cv_k')}:frames", maxlen=0, approximate=False)
        told = await all_of(await follow_turn(hub, "frames", "tn_k", placed(place), None))
        assert [(ready.seq, ready.kind) for ready in told] == [(0, "gap")]
        hand.write("cv_k", "tn_later", "another turn")
        told = await all_of(await follow_turn(hub, "frames", "tn_k", placed(place), first))
        assert [(ready.seq, ready.kind) for ready in told] == [(0, "gap")]

    with_hub(turnmill_redis.url, body)


def test_a_turn_that_is_quiet_among_busy_ones_still_gives_signs_of_life(turnmill_redis: RedisServer, hand: Hand) -> None:
    first = hand.write("cv_l", "tn_l", "one")
    stop = threading.Event()

    def chatter() -> None:
        while not stop.is_set():
            hand.write("cv_l", "tn_busy", "…")
            stop.wait(0.005)

    async def body(hub: FrameHub) -> None:
        writer = threading.Thread(target=chatter)
        writer.start()
        try:
            frames = await follow_turn(hub, "frames", "tn_l", placed(TurnPlace("cv_l", first, first, False)), None, idle_s=0.1)
            assert frames is not None
            async with aclosing(frames):
                assert (await anext(frames)) is not None
                assert (await anext(frames)) is None
        finally:
            stop.set()
            writer.join()

    with_hub(turnmill_redis.url, body)


def test_waiting_for_an_end_ends_with_it(turnmill_redis: RedisServer, hand: Hand) -> None:
    first = hand.write("cv_m", "tn_m", "one")

    async def body(hub: FrameHub) -> None:
        locate = placed(TurnPlace("cv_m", first, first, False))
        assert not await wait_for_end(hub, "frames", "tn_m", locate, 0.1)
        waiting = asyncio.create_task(wait_for_end(hub, "frames", "tn_m", locate, 60))
        await eventually(lambda: hub.watching == 1)
        hand.put("cv_m", "tn_m", frame(FrameKind.DONE, "tn_m", stop_reason="answer"))
        assert await waiting

    with_hub(turnmill_redis.url, body)
