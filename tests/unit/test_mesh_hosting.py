"""What a host makes of arguments that came as text, and of results that JSON does not know."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from enum import Enum
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ValidationError

from orchestration.core.errors import Misconfigured
from orchestration.core.tool import tool
from orchestration.core.tool_error import ToolError
from orchestration.mesh import wire
from orchestration.mesh.hosting import answers
from orchestration.mesh.hosting.answers import Answer
from orchestration.mesh.hosting.arguments import from_payload, from_texts
from orchestration.mesh.hosting.host import distinct


class Colour(Enum):
    RED = "red"


class Place(BaseModel):
    city: str
    floor: int = 0


def accepted(annotation: Any, text: str) -> Any:
    def function(x: Any) -> None: ...

    function.__annotations__["x"] = annotation
    made = tool("t/x")(function)
    return made.validate(from_texts({"x": text, "stranger": "1"}, made.spec.parameters))["x"]


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (int, "3", 3),
        (int, "007", 7),
        (float, "1.5", 1.5),
        (float, "2", 2.0),
        (bool, "true", True),
        (bool, "True", True),
        (bool, "False", False),
        (bool, "1", True),
        (str, "true", "true"),
        (str, "5", "5"),
        (str, "None", "None"),
        (str, "null", "null"),
        (str, '{"a": 1}', '{"a": 1}'),
        (str | None, "None", None),
        (str | None, "x", "x"),
        (int | None, "None", None),
        (int | None, "4", 4),
        (int | str, "4", "4"),
        (list[int], "[1, 2]", [1, 2]),
        (list[int], "[1,2]", [1, 2]),
        (list[str] | None, "None", None),
        (dict[str, int], '{"k": 1}', {"k": 1}),
        (dict[str, int], "{'k': 1}", {"k": 1}),
        (dict[str, bool], "{'k': True}", {"k": True}),
        (Place, "{'city': 'Paris', 'floor': 2}", Place(city="Paris", floor=2)),
        (Colour, "red", Colour.RED),
        (Literal["1", "2"], "1", "1"),
        (Literal[1, 2], "1", 1),
        (date, "2026-01-02", date(2026, 1, 2)),
        (Any, '{"k": [1]}', {"k": [1]}),
        (Any, "plain", "plain"),
    ],
)
def test_text_becomes_what_the_function_wants(annotation: Any, text: str, value: Any) -> None:
    assert accepted(annotation, text) == value


@pytest.mark.parametrize(
    ("annotation", "text"),
    [(int, "x"), (int, "1.5"), (bool, "maybe"), (list[int], "1"), (list[int], "[" * 90_000), (dict[str, int], "{broken"), (int, "None")],
)
def test_text_that_does_not_fit_is_refused(annotation: Any, text: str) -> None:
    with pytest.raises(ValidationError):
        accepted(annotation, text)


@pytest.mark.parametrize("payload", [b"[1]", b"5", b"nonsense", b"\xff", b"null"])
def test_a_payload_is_an_object_or_refused(payload: bytes) -> None:
    with pytest.raises(ValueError):
        from_payload(payload)


def test_a_validation_error_shows_no_input() -> None:
    @tool("t/secret")
    def secret(pin: int) -> None: ...

    with pytest.raises(ValidationError) as caught:
        secret.validate({"pin": "canary-value"})
    answer = answers.of_invalid(caught.value, correlation_id="c")
    read = wire.decode_reply(answer.payload)
    assert read.code == "validation_error"
    assert read.details[0]["loc"] == ["pin"]
    assert b"canary-value" not in answer.payload


@dataclass
class Parcel:
    weight: float
    label: bytes


class Odd:
    def __str__(self) -> str:
        return "odd one"


def looped() -> list[Any]:
    loop: list[Any] = [1]
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    ("result", "value"),
    [
        ({"at": date(2026, 1, 2)}, {"at": "2026-01-02"}),
        (Place(city="Oslo"), {"city": "Oslo", "floor": 0}),
        (Parcel(math.inf, b"ok"), {"weight": None, "label": "ok"}),
        ({"b": b"\xff\xfe"}, {"b": "__4="}),
        ({Colour.RED: {3}}, {"red": [3]}),
        (Odd(), "odd one"),
        ([math.nan], [None]),
        ("x\ud83dy", "x\ufffdy"),
        (2**200, 2**200),
        (None, None),
    ],
)
def test_results_become_json(result: Any, value: Any) -> None:
    assert json.loads(answers.of_result(result).payload) == value


@pytest.mark.parametrize("make", [looped, Odd, object, lambda: {"deep": [[[]]]}])
def test_no_result_breaks_the_host(make: Callable[[], Any]) -> None:
    json.loads(answers.of_result(make()).payload)


def test_bytes_travel_as_bytes_and_are_kept() -> None:
    answer = answers.of_result(b"\x89PNG\x00")
    assert (answer.payload, answer.encoding) == (b"\x89PNG\x00", "application/octet-stream")
    assert Answer.from_kept(answer.kept()) == answer


def test_exceptions_are_masked_and_tool_errors_speak() -> None:
    masked = wire.decode_reply(answers.of_exception(RuntimeError("password=hunter2"), correlation_id="c").payload)
    assert (masked.code, masked.message) == ("internal_error", "Internal error")
    spoken = wire.decode_reply(answers.of_exception(ToolError("out_of_stock", "none left"), correlation_id="c").payload)
    assert (spoken.code, spoken.message) == ("out_of_stock", "none left")
    assert ToolError("not a code!", "m").code == "internal_error"


def test_two_tools_with_one_prefix_are_refused_by_name() -> None:
    def first(x: int) -> None: ...
    def second(x: int) -> None: ...

    one, two = tool("t/same")(first), tool("t/same")(second)
    assert distinct([one, one]) == (one,)
    with pytest.raises(Misconfigured, match=r"first.*second"):
        distinct([one, two])
