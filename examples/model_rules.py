"""What the example model server answers: a pure function from the messages of a conversation to an answer or tool calls.

| the last user message has | the answer |
|---|---|
| `slowtokens N S` | N tokens with S seconds before each |
| `sleep S` | a short answer after S seconds of silence |
| `fail STATUS` | that HTTP status |
| `empty` alone | nothing |
| `say TEXT` | TEXT |
| `call NAME {JSON}` | a call of the tool NAME with exactly these arguments |
| `calls N` | N calls of the adding tool in one round |
| `rounds N` | N rounds with one call of the adding tool each |
| `refund … o-NN`, and perhaps an amount | a call of the refunding tool |
| `A plus B`, `A + B`, `add A and B`, `sum of A and B` | a call of the adding tool; both may come in one message |
| anything else | a friendly sentence |

Once the results of the calls are there, the answer tells them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

NUMBER = r"(-?\d+(?:\.\d+)?)"
SUM = re.compile(rf"(?:add\s+{NUMBER}\s+(?:and|to)\s+{NUMBER}|sum of\s+{NUMBER}\s+and\s+{NUMBER}|{NUMBER}\s*(?:plus|\+)\s*{NUMBER})", re.I)
ORDER = re.compile(r"\bo-\d+\b", re.I)
MONEY = re.compile(rf"(?:€\s*{NUMBER}|{NUMBER}\s*(?:€|euros?\b|EUR\b))", re.I)

#: What is refunded when the customer names no amount, in euros.
USUAL_AMOUNT = 20.0

#: The longest wait and the most tokens or calls that a request may ask for.
MAX_SECONDS, MAX_COUNT = 600.0, 10_000


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server sends: text and calls as (name, arguments in JSON), or an error's status.

    `wait_s` are the seconds before anything comes, `pause_s` those between two tokens (0: the server's own pace).
    """

    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    status: int = 200
    wait_s: float = 0.0
    pause_s: float = 0.0


def answer_to(messages: Sequence[dict[str, Any]], tools: Sequence[str]) -> Answer:
    """The answer to `messages`, with the tools of these names at hand. The same messages always get the same answer."""
    asked_at = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)
    text = _text(messages[asked_at].get("content")) if asked_at >= 0 else ""
    since = messages[asked_at + 1 :]
    rounds = sum(1 for message in since if message["role"] == "assistant" and message.get("tool_calls"))
    if match := re.search(rf"\bslowtokens (\d+) {NUMBER}", text):
        count = min(int(match[1]), MAX_COUNT)
        return Answer(" ".join(f"t{number}" for number in range(count)), pause_s=_seconds(match[2]))
    if match := re.search(rf"\bsleep {NUMBER}", text):
        return Answer(f"I slept for {match[1]} s.", wait_s=_seconds(match[1]))
    if match := re.search(r"\bfail ([45]\d\d)\b", text):
        return Answer(status=int(match[1]))
    if text.strip() == "empty":
        return Answer()
    if match := re.match(r"\s*say (.+)", text, re.S):
        return Answer(match[1])
    wanted = _wanted(text, tools, rounds)
    if wanted:
        return Answer("Let me see to that. " if rounds == 0 else "", calls=tuple(wanted))
    if rounds:
        return Answer(_report(since))
    return Answer(f"Hello! You said: {text[:200]!r}. I can add numbers and refund orders." if text else "Hello! What can I do for you?")


def pieces(text: str) -> Iterator[str]:
    """`text` in tokens: words with the space before them."""
    return (match[0] for match in re.finditer(r"\s*\S+|\s+$", text))


def _wanted(text: str, tools: Sequence[str], rounds: int) -> list[tuple[str, str]]:
    adding = next((name for name in tools if name.endswith("add")), None)
    refunding = next((name for name in tools if name.endswith("refund")), None)
    if adding and (match := re.search(r"\brounds (\d+)\b", text)):
        return [(adding, _json(a=rounds, b=1))] if rounds < int(match[1]) else []
    if rounds:
        return []
    if match := re.search(r"\bcall ([A-Za-z0-9_-]+) (\{.*\})", text, re.S):
        return [(match[1], match[2])]
    if adding and (match := re.search(r"\bcalls (\d+)\b", text)):
        return [(adding, _json(a=number, b=1)) for number in range(min(int(match[1]), MAX_COUNT))]
    calls = []
    if adding and (match := SUM.search(text)):
        a, b = (float(number) for number in match.groups() if number is not None)
        calls.append((adding, _json(a=a, b=b)))
    if refunding and "refund" in text.lower() and (order := ORDER.search(text)):
        money = MONEY.search(text)
        amount = float(next(number for number in money.groups() if number is not None)) if money else USUAL_AMOUNT
        calls.append((refunding, _json(order_id=order[0], amount=amount)))
    return calls


def _report(since: Sequence[dict[str, Any]]) -> str:
    """The results of all calls since the user spoke, one sentence each."""
    called: dict[str, tuple[str, Any]] = {}
    sentences = []
    for message in since:
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            called[str(call.get("id"))] = (str(function.get("name")), _parsed(function.get("arguments")))
        if message["role"] == "tool":
            name, arguments = called.get(str(message.get("tool_call_id")), ("a tool", None))
            sentences.append(_sentence(name, arguments, _text(message.get("content"))))
    return " ".join(sentences)


def _sentence(name: str, arguments: Any, content: str) -> str:
    result = _parsed(content)
    if name.endswith("refund") and isinstance(result, dict) and "refunded" in result:
        return f"Order {result.get('order_id')} is refunded: {result['refunded']} {result.get('currency', '')}".strip() + "."
    if name.endswith("add") and isinstance(result, (int, float)) and isinstance(arguments, dict):
        return f"The sum of {arguments.get('a')} and {arguments.get('b')} is {result}."
    return f"{name} says: {content[:500]}"


def _seconds(text: str) -> float:
    return min(max(float(text), 0.0), MAX_SECONDS)


def _text(content: Any) -> str:
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _parsed(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return None


def _json(**arguments: Any) -> str:
    return json.dumps(arguments)
