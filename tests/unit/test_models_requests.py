"""What is sent to a model's server is what strict servers take, whatever the conversation holds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestration.core.errors import ModelError
from orchestration.models.anthropic_request import messages_payload
from orchestration.models.chat_request import chat_payload
from orchestration.models.wire_json import body_of

TOOL = {"type": "function", "function": {"name": "geo", "description": "Where.", "parameters": {"type": "object", "properties": {"q": {}}}}}


def called(arguments: Any, **more: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "tc_1", "function": {"name": "geo", "arguments": arguments}}],
        **more,
    }


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"stream": True, "thinking_field": None, "extra": {}, **more}
    return json.loads(body_of("m", chat_payload("m", list(messages), None, **options)))


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ({"q": "é"}, {"q": "é"}),
        ('{"q": "é"}', {"q": "é"}),
        ("", {}),
        (None, {}),
        ("{'q': 1}", {"malformed": "{'q': 1}"}),
        ("[1]", {"malformed": "[1]"}),
        ({"q": float("nan")}, {"q": None}),
        ('{"q": NaN}', {"q": None}),
    ],
)
def test_arguments_in_the_history_are_text_of_an_object_encoded_once(arguments: Any, meant: dict[str, Any]) -> None:
    text = chat(called(arguments))["messages"][0]["tool_calls"][0]["function"]["arguments"]
    assert isinstance(text, str)
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name)) == meant


@pytest.mark.parametrize(
    ("content", "text"),
    [({"a": [1, 2]}, '{"a":[1,2]}'), (7, "7"), (True, "true"), (None, ""), ("", ""), ([{"type": "text", "text": "x"}], "x")],
)
def test_a_tool_result_is_always_text(content: Any, text: str) -> None:
    assert chat({"role": "tool", "tool_call_id": "tc_1", "content": content})["messages"][0]["content"] == text


def test_content_is_never_null_and_parts_of_a_user_stay() -> None:
    parts = [{"type": "text", "text": "what is this"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    sent = chat(called("{}"), {"role": "user", "content": parts})["messages"]
    assert sent[0]["content"] == ""
    assert sent[1]["content"] == parts


def test_thinking_goes_back_only_where_it_is_wanted() -> None:
    history = [
        called("{}", reasoning_content="Hm."),
        {"role": "assistant", "content": "x", "thinking": "So."},
        {"role": "assistant", "content": "y"},
    ]
    assert not any("reasoning_content" in message or "thinking" in message for message in chat(*history)["messages"])
    assert [message["reasoning_content"] for message in chat(*history, thinking_field="reasoning_content")["messages"]] == [
        "Hm.",
        "So.",
        "",
    ]


def test_names_that_a_model_made_up_do_not_spoil_the_history() -> None:
    message = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "étage/1" + "x" * 80, "arguments": "{}"}}]}
    name = chat(message)["messages"][0]["tool_calls"][0]["function"]["name"]
    assert name == ("_tage_1" + "x" * 80)[:64]


def test_fields_of_our_own_stay_here_and_extra_ones_go_out() -> None:
    sent = chat({"role": "user", "content": "x", "seq": 7}, extra={"temperature": 0, "stream_options": None})
    assert sent == {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True, "temperature": 0}


def test_half_characters_and_infinities_are_sent_as_strict_json() -> None:
    raw = body_of("m", {"text": "a\ud83d\ude00b\ud83d", "number": float("inf")})
    assert raw == b'{"text":"a\xf0\x9f\x98\x80b\xef\xbf\xbd","number":null}'
    with pytest.raises(ModelError) as caught:
        body_of("m", {"text": object()})
    assert caught.value.kind == "bad_request"


def anthropic(*messages: dict[str, Any], tools: Any = None, **extra: Any) -> dict[str, Any]:
    return messages_payload("m", list(messages), tools, max_tokens=100, stream=True, send_thinking=True, extra=extra)


def test_a_conversation_is_told_in_the_messages_form() -> None:
    sent = anthropic(
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "where?"},
        called('{"q": "x"}', thinking_blocks='[{"type": "thinking", "thinking": "Hm.", "signature": "s"}]'),
        {"role": "user", "content": "quick!"},
        {"role": "tool", "tool_call_id": "tc_1", "content": {"at": 1}},
        {"role": "assistant", "content": "There. "},
        {"role": "assistant", "content": ""},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "and?"}, {"type": "image_url", "image_url": {"url": "https://e.org/a.png"}}]},
        tools=[TOOL],
    )
    assert sent["system"] == "Be brief.\n\nBe kind."
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "user", "assistant", "user"]
    assert sent["messages"][1]["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "tool_use", "id": "tc_1", "name": "geo", "input": {"q": "x"}},
    ]
    assert sent["messages"][2]["content"] == [
        {"type": "tool_result", "tool_use_id": "tc_1", "content": '{"at":1}'},
        {"type": "text", "text": "quick!"},
    ]
    assert sent["messages"][3]["content"] == [{"type": "text", "text": "There."}]
    assert sent["messages"][4]["content"][1] == {"type": "image", "source": {"type": "url", "url": "https://e.org/a.png"}}
    assert sent["tools"] == [{"name": "geo", "description": "Where.", "input_schema": TOOL["function"]["parameters"]}]


def test_images_as_data_are_sent_as_data_and_other_content_is_refused() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/jpg;base64,QUJD"}}
    source = {"type": "base64", "media_type": "image/jpeg", "data": "QUJD"}
    assert anthropic({"role": "user", "content": [image]})["messages"][0]["content"] == [{"type": "image", "source": source}]
    for part in ({"type": "input_audio"}, {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}):
        with pytest.raises(ModelError) as caught:
            anthropic({"role": "user", "content": [part]})
        assert caught.value.kind == "bad_request"


def test_a_history_with_calls_is_accepted_when_no_tool_may_be_called() -> None:
    sent = anthropic(called("{}"), {"role": "tool", "tool_call_id": "tc_1", "content": ""})
    assert sent["messages"][0]["role"] == "user"
    assert [tool["name"] for tool in sent["tools"]] == ["geo"]
    assert sent["tool_choice"] == {"type": "none"}
    assert sent["messages"][2]["content"] == [{"type": "tool_result", "tool_use_id": "tc_1"}]
