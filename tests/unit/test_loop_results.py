"""What a model reads of a tool's answer, whatever kind of value it is."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from orchestration.core.result_text import result_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("", ""),
        ("as it is", "as it is"),
        (None, "null"),
        (7, "7"),
        (True, "true"),
        ({"a": [1, 2]}, '{"a":[1,2]}'),
        (["é"], '["é"]'),
        ({"x": math.nan, "y": -math.inf}, '{"x":null,"y":null}'),
        (b"\x89PNG", '"[4 bytes]"'),
        ({1, 2} and {"s": {1}}, '{"s":[1]}'),
        ("half \ud83d", "half \ufffd"),
        ({"content": [{"type": "text", "text": "one"}, {"type": "text", "text": ""}, {"type": "text", "text": "two"}]}, "one\ntwo"),
        ({"content": [{"type": "text", "text": ""}]}, '{"content":[{"type":"text","text":""}]}'),
        ({"content": []}, '{"content":[]}'),
        ({"content": [{"type": "image", "data": "x"}]}, '{"content":[{"type":"image","data":"x"}]}'),
        ({"content": [{"type": "text", "text": "x"}], "isError": True}, '{"content":[{"type":"text","text":"x"}],"isError":true}'),
    ],
)
def test_every_kind_of_value_becomes_text(value: Any, text: str) -> None:
    assert result_text(value) == text


def test_an_object_that_json_cannot_hold_is_described() -> None:
    assert json.loads(result_text({"o": object(), "deep": None})) == {"o": "[object]", "deep": None}
