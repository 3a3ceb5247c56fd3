"""Every provider's way of saying no becomes one kind of error, and its words never carry the request or a key further."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestration.core.errors import ModelError
from orchestration.models.error_text import MAX_CHARS, Shown
from orchestration.models.faults import fault_in_stream, fault_of_answer, retry_after


def fault(status: int, body: Any, headers: dict[str, str] | None = None, shown: Shown | None = None) -> ModelError:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return fault_of_answer("model 'm' at host", status, headers or {}, raw, shown or Shown())


def said(message: str, **more: Any) -> dict[str, Any]:
    return {"error": {"message": message, **more}}


@pytest.mark.parametrize(
    ("status", "body", "kind", "retryable"),
    [
        (400, said("the request exceeds the available context size", type="exceed_context_size_error"), "context_overflow", False),
        (400, said("The input token count (9) exceeds the maximum number of tokens allowed (8)."), "context_overflow", False),
        (400, said("This model's maximum prompt length is 131072 but the request contains 537812 tokens."), "context_overflow", False),
        (400, said("Input is too long for requested model."), "context_overflow", False),
        (400, said("input length and `max_tokens` exceed context limit: 199000 + 8192 > 200000"), "context_overflow", False),
        (500, said("input length exceeds the context length"), "context_overflow", False),
        (
            413,
            {"type": "error", "error": {"type": "request_too_large", "message": "Request exceeds the maximum size"}},
            "context_overflow",
            False,
        ),
        (413, said("Request too large for model", code="rate_limit_exceeded", type="tokens"), "context_overflow", False),
        (429, said("Request too large for gpt on tokens per min (TPM): Limit 10, Requested 20"), "context_overflow", False),
        (429, said("Too many tokens, please wait before trying again."), "rate_limited", True),
        (400, said("max_tokens is too large: 5000. This model supports at most 4096 completion tokens"), "bad_request", False),
        (429, said("You exceeded your current quota", code="insufficient_quota"), "quota", False),
        (
            429,
            {
                "error": {
                    "code": 429,
                    "message": "You exceeded your current quota",
                    "status": "RESOURCE_EXHAUSTED",
                    "details": [{"@type": "RetryInfo", "retryDelay": "17.5s"}],
                }
            },
            "rate_limited",
            True,
        ),
        (400, said("Your credit balance is too low to access the API", type="invalid_request_error"), "quota", False),
        (402, said("Insufficient Balance"), "quota", False),
        (403, said("Project does not have access to model"), "auth", False),
        (400, said("API key not valid. Please pass a valid API key.", status="INVALID_ARGUMENT"), "auth", False),
        (
            400,
            said("The response was filtered", code="content_filter", innererror={"code": "ResponsibleAIPolicyViolation"}),
            "content_filtered",
            False,
        ),
        (404, said("The model `x` does not exist", code="model_not_found"), "bad_request", False),
        (404, {"detail": "Not Found"}, "bad_request", False),
        (400, [said("Function calling is unsupported")], "bad_request", False),
        (302, b"", "bad_request", False),
        (408, b"", "unavailable", True),
        (409, b"", "unavailable", True),
        (500, b"Internal Server Error", "unavailable", True),
        (503, {"error": "loading model"}, "unavailable", True),
        (524, b"<html></html>", "unavailable", True),
        (501, said("not implemented"), "unavailable", False),
        (500, b"\xff\xfe{", "unavailable", True),
        (400, b"[" * 100_000, "bad_request", False),
        (400, {"error": {"message": {"text": 1}, "code": None, "type": []}}, "bad_request", False),
    ],
)
def test_a_refusal_has_its_kind(status: int, body: Any, kind: str, retryable: bool) -> None:
    error = fault(status, body)
    assert (error.kind, error.retryable, error.status) == (kind, retryable, status)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("engine died", "unavailable"),
        ({"type": "overloaded_error", "message": "Overloaded"}, "unavailable"),
        ({"type": "invalid_request_error", "message": "bad"}, "bad_request"),
        ({"code": 502, "message": "gone"}, "unavailable"),
        ({"code": "401", "message": "no"}, "auth"),
        ({"code": "rate_limit_exceeded"}, "rate_limited"),
        ({"message": "prompt is too long: 9 tokens > 8 maximum"}, "context_overflow"),
        ({"code": "9" * 5000}, "unavailable"),
        (True, "unavailable"),
    ],
)
def test_an_error_inside_an_answer_has_its_kind(error: Any, kind: str) -> None:
    assert fault_in_stream("model 'm'", error, Shown()).kind == kind


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "3"}, 3.0),
        ({"retry-after": "0.25"}, 0.25),
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:09 GMT", "date": "Wed, 21 Oct 2015 07:28:02 GMT"}, 7.0),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "inf"}, None),
        ({}, None),
    ],
)
def test_the_pause_that_a_server_asks_for_is_read(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers) == seconds
    assert fault(429, said("slow down"), headers).retry_after_s == seconds


def test_a_pause_in_the_body_counts() -> None:
    body = {"error": {"status": "RESOURCE_EXHAUSTED", "details": [{"retryDelay": "17.5s"}]}}
    assert fault(429, body).retry_after_s == 17.5


def test_the_place_of_a_wrong_field_is_named_but_not_what_was_sent() -> None:
    wrong = {"loc": ["body", "messages", 0, "role"], "msg": "not a valid role", "input": "my secret", "ctx": {"given": "my secret"}}
    text = str(fault(422, {"detail": [wrong]}))
    assert "messages.0.role: not a valid role" in text
    assert "secret" not in text


def test_a_page_never_reaches_a_message() -> None:
    text = str(fault(502, b"<html><head><title>502 Bad Gateway</title></head><body><h1>Bad</h1></body></html>"))
    assert text == "model 'm' at host answered 502"


def test_a_message_is_one_short_line() -> None:
    text = str(fault(400, said("line\r\n\x1b[31mline\u2028" + "word " * 2000)))
    assert text.isprintable()
    assert len(text) < MAX_CHARS + 60


def test_what_was_sent_is_cut_out_of_a_message() -> None:
    prompt = "the patient Ada Lovelace was born on\n10 December 1815 in London"
    shown = Shown([{"role": "user", "content": prompt}, {"role": "user", "content": "tulip"}], "sk-very-secret-key-0001")
    text = str(
        fault(400, said(f"Bad input: {prompt!r}; unknown word 'tulip'; key sk-very-secret-key-0001 and Bearer abc.def"), shown=shown)
    )
    for secret in ("Ada", "Lovelace", "1815", "tulip", "secret-key", "abc.def"):
        assert secret not in text
    assert "Bad input" in text
