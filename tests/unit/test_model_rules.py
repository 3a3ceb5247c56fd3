"""The example model answers by rule, from the messages alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from examples.model_rules import USUAL_AMOUNT, answer_to, pieces

TOOLS = ["math-add", "billing-refund"]


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def asked_for(text: str, tools: list[str] = TOOLS) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in answer_to([user(text)], tools).calls]


@pytest.mark.parametrize(
    ("text", "a", "b"),
    [
        ("add 2 and 3", 2, 3),
        ("Add 2.5 to -3, please", 2.5, -3),
        ("what is 19.5 plus 22.5?", 19.5, 22.5),
        ("1+1", 1, 1),
        ("the sum of 4 and 5", 4, 5),
    ],
)
def test_a_sum_becomes_a_call_of_the_adding_tool(text: str, a: float, b: float) -> None:
    assert asked_for(text) == [("math-add", {"a": a, "b": b})]


def test_one_message_may_ask_for_a_refund_and_a_sum() -> None:
    assert asked_for("Refund o-42, it cost 25.50 euros. What is 1 plus 2?") == [
        ("math-add", {"a": 1, "b": 2}),
        ("billing-refund", {"order_id": "o-42", "amount": 25.5}),
    ]


def test_a_refund_without_an_amount_is_the_usual_one() -> None:
    assert asked_for("please refund o-7") == [("billing-refund", {"order_id": "o-7", "amount": USUAL_AMOUNT})]


def test_a_tool_that_is_not_there_is_not_asked_for() -> None:
    assert asked_for("add 2 and 3", ["billing-refund"]) == []


def test_results_are_told_in_the_answer() -> None:
    messages = [
        user("Refund o-42, 25.50 euros. What is 1 plus 2?"),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "x", "type": "function", "function": {"name": "math-add", "arguments": '{"a": 1.0, "b": 2.0}'}},
                {"id": "y", "type": "function", "function": {"name": "billing-refund", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "x", "content": "3.0"},
        {"role": "tool", "tool_call_id": "y", "content": '{"order_id": "o-42", "refunded": 19.9, "currency": "EUR"}'},
    ]
    answer = answer_to(messages, TOOLS)
    assert answer.calls == ()
    assert answer.text == "The sum of 1.0 and 2.0 is 3.0. Order o-42 is refunded: 19.9 EUR."


def test_only_the_last_turn_of_a_conversation_counts() -> None:
    messages = [user("add 2 and 3"), {"role": "assistant", "content": "5"}, user("thanks")]
    answer = answer_to(messages, TOOLS)
    assert answer.calls == () and "thanks" in answer.text


def test_rounds_are_counted_from_the_messages() -> None:
    messages = [user("rounds 2")]
    for number in range(2):
        (call,) = answer_to(messages, TOOLS).calls
        assert json.loads(call[1])["a"] == number
        function = {"name": call[0], "arguments": call[1]}
        messages.append(
            {"role": "assistant", "content": None, "tool_calls": [{"id": f"c{number}", "type": "function", "function": function}]}
        )
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": str(number + 1)})
    assert answer_to(messages, TOOLS).calls == ()


def test_any_call_can_be_ordered_word_for_word() -> None:
    assert answer_to([user('call billing-refund {"order_id": 7')], TOOLS).calls == ()
    assert answer_to([user('call nothing-here {"broken": }')], TOOLS).calls == (("nothing-here", '{"broken": }'),)


def test_waits_statuses_and_token_counts_are_as_asked() -> None:
    slow = answer_to([user("slowtokens 5 0.25")], [])
    assert (len(list(pieces(slow.text))), slow.pause_s) == (5, 0.25)
    assert answer_to([user("sleep 1.5")], []).wait_s == 1.5
    assert answer_to([user("fail 503")], []).status == 503
    assert answer_to([user("empty")], []).text == ""
    assert answer_to([user("say exactly this")], []).text == "exactly this"


@pytest.mark.parametrize("content", [None, 7, [], [{"type": "text", "text": "hi"}, "broken", {"type": "image_url"}], "x" * 100_000])
def test_odd_content_is_answered_all_the_same(content: Any) -> None:
    assert answer_to([user(content)], TOOLS).status == 200


def test_pieces_make_the_text_again() -> None:
    for text in ("", " ", "one two  three\nfour ", "ü €"):
        assert "".join(pieces(text)) == text
