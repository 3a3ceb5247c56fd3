"""Long conversations: what is sent of them, when it becomes shorter, and what never does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from orchestration import Agent, ElideToolResults, Limited, Limits, Message, Model, ModelReply, RequestedCall, tool
from orchestration.actions import read
from orchestration.core.call import CallResult, CallState
from orchestration.core.compaction import View, checked, grouped, older_part, trimmed
from orchestration.core.conversation import Entry, input_entry, message_entry, messages, round_entries
from orchestration.core.errors import CompactionError, ModelError
from orchestration.core.model import Usage
from orchestration.models import ScriptedModel, Step, call_model, call_model_async
from orchestration.testing.frames import assert_paired, assert_whole, kinds, only
from orchestration.testing.local import LocalTurnmill

Turnmill = Callable[..., LocalTurnmill]


@tool("log/query")
def query(n: int) -> str:
    """Query the logs."""
    return f"line {n} " * 40


@tool("plan/read")
def plan_read() -> str:
    """Read the plan."""
    return "the plan: " + "x" * 200


def asks(n: int, tokens: int) -> Step:
    return Step(f"looking at {n}", tool_calls=[("log-query", {"n": n})], usage=Usage(tokens, 1))


def says(text: str, tokens: int = 1) -> Step:
    return Step(text, usage=Usage(tokens, 1))


def results(request: Any) -> list[str]:
    return [message["content"] for message in request.messages if message["role"] == "tool"]


STUB = f"[elided: {len('line 1 ' * 40)} chars of log-query result]"


# ElideToolResults, the default


def test_older_results_become_stubs_once_a_call_was_too_large(turnmill: Turnmill) -> None:
    model = ScriptedModel([asks(1, 10), asks(2, 10), asks(3, 10), asks(4, 101), says("done")])
    here = turnmill(Agent("a", model, tools=[query], compact_after=100))
    turn = here.ask("a", "dig", conversation_id="c")
    assert turn["answer"] == "done"
    assert [content == STUB for content in results(model.requests[4])] == [True, True, False, False], "the last two rounds stay whole"
    assert all(content != STUB for content in results(model.requests[3]))
    shown = model.requests[4].messages
    assert_paired(shown)
    assert (
        shown[0]["content"] == "dig"
        and shown[1]["content"] == "looking at 1"
        and shown[1]["tool_calls"][0]["function"]["name"] == "log-query"
    )
    assert kinds(here.frames("c")).count("compacted") == 1
    assert_whole(here.frames("c"))


def test_the_log_keeps_everything(turnmill: Turnmill) -> None:
    model = ScriptedModel([*(asks(n, 1000) for n in range(5)), says("done")])
    here = turnmill(Agent("a", model, tools=[query], compact_after=100, keep_recent_rounds=1))
    here.ask("a", "dig", conversation_id="c")
    kept = [entry["data"]["content"] for entry in read.history(here.ports, "dev", "c") if entry["data"] != "dig"]
    assert sum("elided" in content for content in kept) == 0


def test_the_shorter_view_is_reused_until_more_has_aged_out(turnmill: Turnmill) -> None:
    model = ScriptedModel([asks(1, 200), asks(2, 200), asks(3, 200), says("a", 200), says("b", 50), says("c", 50)])
    compactions: list[int] = []

    def compact(older: Sequence[Message]) -> list[Message]:
        compactions.append(len(older))
        return [{"role": "user", "content": f"summary {len(compactions)}"}]

    here = turnmill(Agent("a", model, tools=[query], compact_after=100, keep_recent_rounds=2, compactor=compact))
    here.ask("a", "one", conversation_id="c")
    assert compactions == [3]
    here.ask("a", "two", conversation_id="c")
    assert compactions == [3, 3], "another round has aged out; the first summary is among the messages"
    here.ask("a", "three", conversation_id="c")
    assert compactions == [3, 3], "the last call was small"
    first = [request.messages[0]["content"] for request in model.requests]
    assert first == ["one", "one", "one", "summary 1", "summary 2", "summary 2"]


def test_the_view_survives_a_restart(turnmill: Turnmill) -> None:
    model = ScriptedModel([asks(1, 200), asks(2, 200), asks(3, 200), says("done", 1), says("again")])
    here = turnmill(Agent("a", model, tools=[query], compact_after=100))
    here.ask("a", "dig", conversation_id="c")
    here.ask("a", "more", conversation_id="c")
    before, after = (results(model.requests[at]) for at in (3, 4))
    assert before == after and STUB in before


def test_some_results_stay_whole(turnmill: Turnmill) -> None:
    model = ScriptedModel(
        [Step(tool_calls=[("plan-read", {}), ("log-query", {"n": 1})], usage=Usage(200)), asks(2, 200), asks(3, 200), says("done")]
    )
    here = turnmill(Agent("a", model, tools=[query, plan_read], compact_after=100, compactor=ElideToolResults(keep={"plan-read"})))
    here.ask("a", "dig")
    assert results(model.requests[3])[0].startswith("the plan") and results(model.requests[3])[1] == STUB


def test_a_stub_keeps_the_first_size_and_short_results_stay() -> None:
    elide = ElideToolResults()
    older = [{"role": "tool", "name": "t", "content": "x" * 100}, {"role": "tool", "name": "t", "content": "short"}]
    once = elide.compact(older)
    assert [message["content"] for message in once] == ["[elided: 100 chars of t result]", "short"]
    assert elide.compact(once) == once


def test_a_compactor_sees_results_as_short_as_the_model_did(turnmill: Turnmill) -> None:
    model = ScriptedModel([asks(1, 200), asks(2, 200), asks(3, 200), says("done")])
    here = turnmill(Agent("a", model, tools=[query], compact_after=100, limits=Limits(max_tool_result_chars=50)))
    here.ask("a", "dig")
    stub = results(model.requests[3])[0]
    assert stub.startswith("[elided: ") and int(stub.split()[1]) < 150


def test_the_model_sees_a_mark_where_a_result_was_cut_and_a_stub_counts_it(turnmill: Turnmill) -> None:
    def asks_for(chars: int, tokens: int) -> Step:
        return Step(tool_calls=[("log-page", {"chars": chars})], usage=Usage(tokens, 1))

    @tool("log/page")
    def page(chars: int) -> str:
        """Read a page."""
        return "y" * chars

    model = ScriptedModel([asks_for(8_000, 1), asks_for(8_001, 1), asks_for(9_000, 200), says("done")])
    here = turnmill(Agent("a", model, tools=[page], compact_after=100, keep_recent_rounds=1))
    here.ask("a", "read", conversation_id="c")
    cut = "y" * 8_000 + "\n[truncated: 1 of 8001 characters are not shown]"
    assert results(model.requests[2]) == ["y" * 8_000, cut]
    stubs = [f"[elided: {size} chars of log-page result]" for size in (8_000, len(cut))]
    assert results(model.requests[3])[:2] == stubs
    kept = [entry["data"]["content"] for entry in read.history(here.ports, "dev", "c")[1:] if entry["data"]["kind"] == "tool_result"]
    assert [len(content) for content in kept] == [8_000, 8_001, 9_000]


def test_what_is_missing_is_told_of_the_whole_result(turnmill: Turnmill) -> None:
    @tool("log/dump")
    def dump() -> str:
        """Dump."""
        return "z" * 5_000_000

    model = ScriptedModel([[("log-dump", {})], says("done")])
    here = turnmill(Agent("a", model, tools=[dump]))
    assert here.ask("a", "dig", conversation_id="c")["answer"] == "done"
    [seen] = results(model.requests[1])
    assert len(seen) < 8_100 and seen.endswith("[truncated: 4992000 of 5000000 characters are not shown]")
    assert max(len(json.dumps(frame)) for frame in here.frames("c")) < 70_000


@pytest.mark.parametrize(
    ("most", "seen"),
    [
        (0, "\n[truncated: 280 of 280 characters are not shown]"),
        (6, "line 1\n[truncated: 274 of 280 characters are not shown]"),
        (None, "line 1 " * 40),
        (280, "line 1 " * 40),
    ],
)
def test_the_bound_of_a_result_may_be_anything(turnmill: Turnmill, most: int | None, seen: str) -> None:
    model = ScriptedModel([asks(1, 1), says("done")])
    turnmill(Agent("a", model, tools=[query], limits=Limits(max_tool_result_chars=most))).ask("a", "dig")
    assert results(model.requests[1]) == [seen]


# Compactors of users


def test_a_compactor_may_be_async_and_gets_no_system_prompt(turnmill: Turnmill) -> None:
    seen: list[list[Message]] = []

    class Summarise:
        async def compact(self, older: Sequence[Message]) -> list[Message]:
            await asyncio.sleep(0)
            seen.append(list(older))
            older[0]["content"] = "its copy, not ours"
            return [older[0], {"role": "user", "content": "summary"}]

    model = ScriptedModel([asks(1, 200), asks(2, 200), asks(3, 200), says("done")])
    here = turnmill(Agent("a", model, tools=[query], system="You dig.", compact_after=100, compactor=Summarise()))
    here.ask("a", "dig", conversation_id="c")
    assert [message["role"] for message in seen[0]] == ["user", "assistant", "tool"]
    assert [message["role"] for message in model.requests[3].messages] == [
        "system",
        "user",
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
    ]


@pytest.mark.parametrize(
    "compact",
    [
        lambda older: [message for message in older if message["role"] != "tool"],
        lambda older: [message for message in older if not message.get("tool_calls")],
        lambda older: "a summary",
        lambda older: [{"role": "user", "content": "x"}, "y"],
        lambda older: 1 / 0,
    ],
)
def test_a_compactor_that_splits_a_call_from_its_result_is_an_error_and_no_request(turnmill: Turnmill, compact: Any) -> None:
    model = ScriptedModel([asks(1, 200), asks(2, 200), asks(3, 200), says("never")])
    turn = turnmill(Agent("a", model, tools=[query], compact_after=100, compactor=compact)).ask("a", "dig")
    assert (turn["state"], turn["error"]["code"]) == ("failed", "compaction_error")
    assert model.asked == 3


def test_a_passing_fault_of_a_summarising_model_is_tried_again(turnmill: Turnmill) -> None:
    tries: list[int] = []

    def compact(older: Sequence[Message]) -> list[Message]:
        tries.append(1)
        if len(tries) == 1:
            raise ModelError("unavailable", "away", retryable=True)
        return [{"role": "user", "content": "summary"}]

    model = ScriptedModel([asks(1, 200), asks(2, 200), asks(3, 200), says("done")])
    turn = turnmill(Agent("a", model, tools=[query], compact_after=100, compactor=compact)).ask("a", "dig")
    assert turn["answer"] == "done" and len(tries) == 2


PRICES = json.dumps({"scripted": {"input": 1, "output": 1}, "small": {"input": 10, "output": 100}})


def summary(model: Model, *, in_async_code: bool = False) -> Any:
    """A compactor that asks `model`."""

    def compact(older: Sequence[Message]) -> list[Message]:
        return [{"role": "user", "content": call_model(model, older).content}]

    async def compact_async(older: Sequence[Message]) -> list[Message]:
        return [{"role": "user", "content": (await call_model_async(model, older)).content}]

    return compact_async if in_async_code else compact


class Small:
    """An async model of a user's own."""

    model = "small"

    async def complete(self, messages: Any, *, tools: Any = None) -> ModelReply:
        return ModelReply("short", usage=Usage(1000, 10), model="small")


@pytest.mark.parametrize("in_async_code", [False, True])
@pytest.mark.parametrize("limited", [False, True])
def test_what_a_compactors_model_uses_counts(turnmill: Turnmill, in_async_code: bool, limited: bool) -> None:
    small = Limited(Small(), concurrency=1, requests_per_minute=9) if limited else Small()
    model = ScriptedModel([asks(1, 200), asks(2, 200), asks(3, 200), says("done")])
    agent = Agent("a", model, tools=[query], compact_after=100, compactor=summary(small, in_async_code=in_async_code))
    here = turnmill(agent, prices=PRICES)
    turn = here.ask("a", "dig", conversation_id="c")
    assert turn["answer"] == "done"
    assert turn["usage"] == {"input_tokens": 601 + 1000, "output_tokens": 4 + 10, "cost": (601 + 4 + 10_000 + 1_000) / 1e6}
    assert only(here.frames("c"), "done")["usage"] == turn["usage"]
    assert bool(here.ports.store.client.exists("tm:model:small:begun")) == limited


def test_what_it_used_is_shown_where_the_turn_fails_afterwards(turnmill: Turnmill) -> None:
    model = ScriptedModel([asks(1, 200), asks(2, 200), asks(3, 200), Step(error="auth")])
    here = turnmill(Agent("a", model, tools=[query], compact_after=100, compactor=summary(Small())), prices=PRICES)
    turn = here.ask("a", "dig", conversation_id="c")
    assert turn["error"]["code"] == "model_auth" and turn["usage"]["input_tokens"] == 600 + 1000
    assert only(here.frames("c"), "done")["usage"] == turn["usage"]


def test_a_compactors_model_works_within_the_budget(turnmill: Turnmill) -> None:
    model = ScriptedModel([asks(1, 200), asks(2, 200), asks(3, 200), asks(4, 200), says("never")])
    compactor = summary(ScriptedModel(["short"], model="small"))
    agent = Agent("a", model, tools=[query], compact_after=100, compactor=summary(Small()), limits=Limits(max_cost=0.01))
    turn = turnmill(agent, prices=PRICES).ask("a", "dig")
    assert turn["stop_reason"] == "budget" and model.asked == 3, "the model is not asked once the compactor's used the rest"
    free = turnmill(
        Agent(
            "a",
            ScriptedModel([asks(n, 200) for n in range(4)]),
            tools=[query],
            compact_after=100,
            compactor=compactor,
            limits=Limits(max_cost=1),
        ),
        prices='{"scripted": {"input": 1, "output": 1}}',
    )
    assert free.ask("a", "dig")["error"]["code"] == "misconfigured", "what it costs is not known"


def test_a_compactor_that_would_wait_for_itself_is_told_so(turnmill: Turnmill) -> None:
    async def compact(older: Sequence[Message]) -> list[Message]:
        return [{"role": "user", "content": call_model(Small(), older).content}]

    model = ScriptedModel([asks(1, 200), asks(2, 200), asks(3, 200), says("never")])
    turn = turnmill(Agent("a", model, tools=[query], compact_after=100, compactor=compact)).ask("a", "dig")
    assert "call_model_async" in turn["error"]["detail"]


def test_a_step_tried_again_does_not_compact_again(turnmill: Turnmill) -> None:
    tries: list[int] = []

    def compact(older: Sequence[Message]) -> list[Message]:
        tries.append(1)
        return [{"role": "user", "content": "summary"}]

    away = ModelError("unavailable", "away", retryable=True)
    model = ScriptedModel([asks(1, 200), asks(2, 200), asks(3, 200), away, away, says("done")])
    here = turnmill(Agent("a", model, tools=[query], compact_after=100, compactor=compact))
    assert here.ask("a", "dig", conversation_id="c")["answer"] == "done"
    assert len(tries) == 1 and kinds(here.frames("c")).count("compacted") == 1


# A context that overflows


def overflow() -> ModelError:
    return ModelError("context_overflow", "the messages are too long", retryable=False)


def test_an_overflow_is_met_with_one_compaction(turnmill: Turnmill) -> None:
    model = ScriptedModel([asks(1, 1), asks(2, 1), asks(3, 1), overflow(), says("done")])
    here = turnmill(Agent("a", model, tools=[query]))
    turn = here.ask("a", "dig", conversation_id="c")
    assert (turn["state"], turn["answer"]) == ("completed", "done")
    before, after = (len(json.dumps(model.requests[at].messages)) for at in (3, 4))
    assert after < 0.7 * before
    assert_paired(model.requests[4].messages)
    frame = only(here.frames("c"), "compacted")
    assert frame["chars_after"] < frame["chars_before"]


def test_a_context_that_stays_too_small_ends_the_turn_with_a_stable_code(turnmill: Turnmill) -> None:
    model = ScriptedModel([asks(1, 1), *[Step(error=overflow())] * 3])
    here = turnmill(Agent("a", model, tools=[query]))
    turn = here.ask("a", "dig", conversation_id="c")
    assert (turn["state"], turn["error"]["code"]) == ("failed", "model_context_overflow")
    assert model.asked == 3, "asked once more after the compaction, then never again"
    assert kinds(here.frames("c")).count("compacted") == 1


def test_even_a_first_message_gets_its_one_compaction(turnmill: Turnmill) -> None:
    model = ScriptedModel([overflow(), says("done")])
    here = turnmill(Agent("a", model))
    assert here.ask("a", "hi", conversation_id="c")["answer"] == "done"
    only(here.frames("c"), "compacted")


def test_talk_without_tools_is_shortened_from_its_beginning(turnmill: Turnmill) -> None:
    model = ScriptedModel([*(says("word " * 100) for _ in range(6)), overflow(), says("done")])
    here = turnmill(Agent("a", model))
    for number in range(6):
        here.ask("a", f"question {number}", conversation_id="c")
    turn = here.ask("a", "the last question", conversation_id="c")
    assert turn["answer"] == "done"
    shown = model.requests[-1].messages
    assert shown[-1]["content"] == "the last question" and len(shown) < 13


def test_tokens_shown_before_an_overflow_are_void(turnmill: Turnmill) -> None:
    model = ScriptedModel([Step("half an", chunks=2, error=overflow()), says("whole")])
    here = turnmill(Agent("a", model))
    assert here.ask("a", "hi", conversation_id="c")["answer"] == "whole"
    tokens = [frame["text"] for frame in here.frames("c") if frame["kind"] == "token"]
    assert tokens == ["whole"] or kinds(here.frames("c")).count("retry") == 1


# Trimming by count


def history(*shape: str) -> list[Message]:
    """u: a user's message, a: an answer, t: a call with its result, T: two calls with their results."""
    made: list[Message] = []
    for place, kind in enumerate(shape):
        if kind == "u":
            made.append({"role": "user", "content": str(place)})
        elif kind == "a":
            made.append({"role": "assistant", "content": str(place)})
        else:
            ids = [f"{place}.{number}" for number in range(2 if kind == "T" else 1)]
            calls = [{"id": id_, "type": "function", "function": {"name": "t", "arguments": "{}"}} for id_ in ids]
            made.append({"role": "assistant", "content": None, "tool_calls": calls})
            made += [{"role": "tool", "tool_call_id": id_, "content": "x"} for id_ in ids]
    return made


@pytest.mark.parametrize("most", range(1, 14))
@pytest.mark.parametrize("shape", ["uatuaTtua", "uttttttttt", "uauauauau", "uuTTa", "tatatu", "TTT"])
def test_trimming_never_begins_in_the_middle_of_a_call(shape: str, most: int) -> None:
    whole = history(*shape)
    kept = trimmed(whole, most)
    assert_paired(kept)
    said = [message for message in whole if message["role"] == "user"]
    if said:
        assert said[-1] in kept and (kept == whole or kept[0]["role"] == "user")
    assert len(kept) <= max(most, 4 + shape.count("u")) and kept[-1] == whole[-1]


def test_the_requests_of_a_long_conversation_stay_short_and_well_formed(turnmill: Turnmill) -> None:
    steps: list[Any] = []
    for number in range(20):
        steps += [asks(number, 1), asks(number, 1), says("ok")]
    model = ScriptedModel(steps)
    here = turnmill(Agent("a", model, tools=[query], max_history_messages=8))
    for number in range(20):
        here.ask("a", f"question {number}", conversation_id="c")
    for request in model.requests:
        assert_paired(request.messages)
        assert len(request.messages) <= 8 and request.messages[0]["role"] == "user"


# Thinking


def test_thinking_goes_back_in_the_providers_own_form(turnmill: Turnmill) -> None:
    blocks = json.dumps([{"type": "thinking", "thinking": "two and two", "signature": "sig"}])
    shown: list[list[Message]] = []

    class Thinker:
        model = "thinker"

        def complete(self, messages: Sequence[Message], *, tools: Any = None) -> ModelReply:
            shown.append(json.loads(json.dumps(messages)))
            if len(shown) == 1:
                return ModelReply("", (RequestedCall("log-query", '{"n": 1}'),), "two and two", thinking_blocks=blocks)
            return ModelReply("4", thinking="sum", thinking_blocks=blocks)

    here = turnmill(Agent("a", Thinker(), tools=[query]))
    here.ask("a", "2+2?", conversation_id="c")
    here.ask("a", "and?", conversation_id="c")
    spoken = [message for message in shown[2] if message["role"] == "assistant"]
    assert [message["thinking_blocks"] for message in spoken] == [blocks, blocks]
    assert [message["reasoning_content"] for message in spoken] == ["two and two", "sum"]


# The parts


def log(*shape: str) -> list[Entry]:
    made: list[Entry] = []
    for number, kind in enumerate(shape, 1):
        if kind == "u":
            made.append(input_entry("tn_1", "hi"))
        elif kind == "a":
            made.append(message_entry("tn_1", number, "ok"))
        else:
            made += round_entries("tn_1", number, "", [(f"c{number}", "t", "{}")], [CallResult(CallState.COMPLETED, "r")])
    return made


@pytest.mark.parametrize(
    ("shape", "keep", "entries"),
    [("uttta", 2, 5), ("uttta", 0, 8), ("uttta", 9, 0), ("uaua", 1, 2), ("uauu", 0, 2), ("uauua", 1, 2), ("u", 0, 0), ("", 0, 0)],
)
def test_what_counts_as_older(shape: str, keep: int, entries: int) -> None:
    assert older_part(log(*shape), keep) == entries


def test_a_view_stands_for_the_entries_that_it_covers() -> None:
    entries = log(*"utta")
    view = View.from_json(View(5, [{"role": "user", "content": "summary"}], 3).as_json())
    assert view.over(entries, max_result_chars=None) == [{"role": "user", "content": "summary"}, *messages(entries[5:])]
    assert View.from_json("").over(entries, max_result_chars=None) == messages(entries)


def test_a_list_of_messages_is_checked() -> None:
    assert checked(history(*"uTa")) == history(*"uTa")
    assert [len(group) for group in grouped(history(*"uTta"))] == [1, 3, 2, 1]
    with pytest.raises(CompactionError):
        checked(history(*"uT")[:-1])
