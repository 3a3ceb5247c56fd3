"""What went wrong at a model's server, from whatever shape its error has: one `ModelError` with kind, pause and a short message.

Pure: it takes status, headers and body as values. A message here never carries what was in the request; see `error_text.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from orchestration.core.errors import ModelError
from orchestration.core.model import ModelFault
from orchestration.models.error_text import Shown

#: Kinds that may pass by themselves.
RETRYABLE = frozenset({ModelFault.UNAVAILABLE, ModelFault.RATE_LIMITED, ModelFault.PROTOCOL, ModelFault.TRUNCATED})

_OVERFLOW_CODES = frozenset(
    {"context_length_exceeded", "context_window_exceeded", "model_context_window_exceeded", "exceed_context_size_error",
     "contextwindowexceedederror", "request_too_large", "input_too_long", "prompt_too_long"}
)  # fmt: skip
_QUOTA_CODES = frozenset(
    {"insufficient_quota", "billing_error", "billing_hard_limit_reached", "billing_not_active", "insufficient_balance",
     "insufficient_credits", "insufficient_user_quota", "quota_exceeded", "payment_required", "credit_balance_too_low"}
)  # fmt: skip
_FILTER_CODES = frozenset(
    {"content_filter", "content_policy_violation", "responsibleaipolicyviolation", "data_inspection_failed",
     "datainspectionfailed", "moderation_blocked", "content_filtered", "safety"}
)  # fmt: skip
_AUTH_CODES = frozenset(
    {"invalid_api_key", "authentication_error", "permission_error", "permission_denied", "unauthenticated", "unauthorized",
     "account_deactivated", "authenticationerror", "permissiondeniederror", "invalid_authentication_error", "forbidden"}
)  # fmt: skip
_RATE_CODES = frozenset(
    {"rate_limit_exceeded", "rate_limit_error", "rate_limit_reached_error", "too_many_requests", "ratelimiterror", "resource_exhausted",
     "throttling", "throttlingexception", "requests", "tokens"}
)  # fmt: skip
_DOWN_CODES = frozenset(
    {"overloaded_error", "server_error", "api_error", "internal_error", "internal_server_error", "internalservererror", "timeout_error",
     "timeout", "service_unavailable", "unavailable", "engine_overloaded_error", "deadline_exceeded", "internal", "overloaded",
     "engine_overloaded", "bad_gateway", "service_unavailable_error"}
)  # fmt: skip
_REQUEST_CODES = frozenset(
    {"invalid_request_error", "badrequesterror", "bad_request", "invalid_argument", "not_found_error", "not_found", "model_not_found",
     "notfounderror", "invalid_prompt", "unsupported_value", "invalid_value", "failed_precondition", "unprocessable_entity"}
)  # fmt: skip

# The words of OpenAI, Azure, vLLM, llama.cpp, LM Studio, Ollama, Mistral, Gemini, Bedrock, Cohere, xAI and Anthropic.
_OVERFLOW_WORDS = re.compile(
    r"(maximum|available|max|model'?s?|exceeds? the|exceeds?) (model )?(context|prompt) (length|window|size|limit)"
    r"|context[ _](length|window|size|limit)s?\b.{0,40}(exceed|overflow|too)|exceed\w*.{0,60}context[ _](length|window|size|limit)"
    r"|context the overflows|(prompt|input|conversation|messages?)( length)?( is| are)? too long|input token count.{0,40}exceeds"
    r"|maximum prompt length|too many (input )?tokens|reduce the length of the (messages|prompt|input)|request too large for"
    r"|too large for model|longer than the (model|maximum)|tokens? in the prompt cannot exceed",
    re.IGNORECASE | re.DOTALL,
)
_TOO_LARGE_WORDS = re.compile(r"request too large for", re.IGNORECASE)
_QUOTA_WORDS = re.compile(
    r"exceeded your current quota|credit balance is too low|insufficient (account )?(balance|credits?|quota|funds)|out of credits"
    r"|(spend|spending|billing|usage|monthly|hard) limits? (has been |was |is |have been )?(reached|exceeded)"
    r"|reached your .{0,30}usage limits?",
    re.IGNORECASE,
)
_FILTER_WORDS = re.compile(
    r"content (management|safety|usage) policy|content[ _]filter|content policy|safety system|data inspection|inappropriate content",
    re.IGNORECASE,
)
_KEY_WORDS = re.compile(
    r"(invalid|incorrect|missing|wrong|no) (x-)?api[ -]?key|api[ -]?key (is )?(not valid|invalid|missing|expired)", re.IGNORECASE
)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)s")


def fault_of_answer(who: str, status: int, headers: Mapping[str, str], body: bytes, shown: Shown) -> ModelError:
    """The error that an answer other than 2xx stands for.

    Args:
        who: the model and its server, as the message names them.
        body: as much of the body as was read; JSON of any shape, text, a page, or nothing.
        shown: decides what of the server's words may be repeated.
    """
    text = body.decode("utf-8-sig", "replace").strip()
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        found = text
    codes, words, hint = _read(found)
    retry_after_s = retry_after(headers, hint)
    kind = _kind(status, codes, words, paused=retry_after_s is not None)
    said = shown.of(words)
    message = f"{who} answered {status}" + (f": {said}" if said else "")
    # 501 and 505 say that the server will never do it; asking again is no use.
    retryable = kind in RETRYABLE and status not in (501, 505)
    return ModelError(kind, message, retryable=retryable, retry_after_s=retry_after_s, status=status)


def fault_in_stream(who: str, error: Any, shown: Shown) -> ModelError:
    """The error that a server put into an answer which had begun well; one that does not say what it is counts as passing."""
    codes, words, hint = _read({"error": error})
    numbers = [int(code) for code in codes if len(code) == 3 and code.isdecimal() and 400 <= int(code) <= 599]
    status = numbers[0] if numbers else None
    kind = _kind(status, codes, words, paused=hint is not None)
    said = shown.of(words)
    message = f"{who} failed in the middle of its answer" + (f": {said}" if said else "")
    return ModelError(kind, message, retryable=kind in RETRYABLE, retry_after_s=hint, status=status)


def unreadable(who: str, what: str) -> ModelError:
    """An answer that cannot be understood."""
    return ModelError(ModelFault.PROTOCOL, f"{who}: {what}", retryable=True)


def truncated(who: str) -> ModelError:
    """An answer that stopped before its end."""
    return ModelError(ModelFault.TRUNCATED, f"{who}: the answer ended before its end", retryable=True)


def retry_after(headers: Mapping[str, str], hint: float | None = None) -> float | None:
    """The pause that the server asks for, in seconds (fractions kept), or None. Header names are lower-case.

    A date is measured against the answer's own `date`, so that a wrong clock on either side does no harm.
    """
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        seconds = _seconds(headers.get(name), unit)
        if seconds is not None:
            return seconds
    until = _date(headers.get("retry-after"))
    if until is not None:
        now = _date(headers.get("date")) or datetime.now(UTC)
        return max(0.0, (until - now).total_seconds())
    return hint


def _seconds(value: str | None, unit: float) -> float | None:
    try:
        seconds = float(value or "") / unit
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _date(value: str | None) -> datetime | None:
    try:
        date = parsedate_to_datetime(value or "")
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=UTC)


def _kind(status: int | None, codes: frozenset[str], words: str, *, paused: bool) -> ModelFault:
    early = _kind_by_code(codes) or _kind_by_words(status, words, paused=paused)
    if early is not None:
        return early
    if status is not None:
        return _kind_by_status(status, codes)
    if codes & _RATE_CODES:
        return ModelFault.RATE_LIMITED
    if codes & _REQUEST_CODES and not codes & _DOWN_CODES:
        return ModelFault.BAD_REQUEST
    return ModelFault.UNAVAILABLE


def _kind_by_code(codes: frozenset[str]) -> ModelFault | None:
    if codes & _OVERFLOW_CODES:
        return ModelFault.CONTEXT_OVERFLOW
    if codes & _QUOTA_CODES:
        return ModelFault.QUOTA
    if codes & _FILTER_CODES:
        return ModelFault.CONTENT_FILTERED
    return ModelFault.AUTH if codes & _AUTH_CODES else None


def _kind_by_words(status: int | None, words: str, *, paused: bool) -> ModelFault | None:
    words = words[:4000]
    # A 429 speaks of tokens per minute, unless this one request can never fit into them.
    overflow = _TOO_LARGE_WORDS if status == 429 else _OVERFLOW_WORDS
    if status not in (401, 403) and overflow.search(words):
        return ModelFault.CONTEXT_OVERFLOW
    # Gemini words its limit per minute like a used-up account; a pause in the answer tells the two apart.
    if _QUOTA_WORDS.search(words) and not (status == 429 and paused):
        return ModelFault.QUOTA
    if (status is None or 400 <= status < 429) and _FILTER_WORDS.search(words):
        return ModelFault.CONTENT_FILTERED
    if (status is None or status < 429) and _KEY_WORDS.search(words):
        return ModelFault.AUTH
    return None


def _kind_by_status(status: int, codes: frozenset[str]) -> ModelFault:
    if status in (401, 403, 407):
        return ModelFault.AUTH
    if status == 402:
        return ModelFault.QUOTA
    if status == 413:
        return ModelFault.CONTEXT_OVERFLOW
    if status == 429:
        return ModelFault.RATE_LIMITED
    if status in (408, 409, 423, 425, 499):
        return ModelFault.UNAVAILABLE
    if status >= 500:
        return ModelFault.RATE_LIMITED if codes & _RATE_CODES else ModelFault.UNAVAILABLE
    return ModelFault.BAD_REQUEST


def _read(found: Any) -> tuple[frozenset[str], str, float | None]:
    """(codes and types in lower case, the server's words, a pause it hints at) of an error of any shape."""
    codes: set[str] = set()
    words: list[str] = []
    hint: float | None = None
    for key, value in _leaves(found):
        if key in ("code", "type", "status", "reason") and isinstance(value, (str, int)) and not isinstance(value, bool):
            codes.add(str(value).strip().lower())
        elif key in ("message", "msg", "detail", "error", "error_message", "title", "") and isinstance(value, str):
            words.append(value)
        elif key == "retryDelay" and isinstance(value, str):
            match = _DURATION.fullmatch(value)
            hint = float(match[1]) if match else hint
    return frozenset(codes), "; ".join(dict.fromkeys(words)), hint


def _leaves(found: Any, key: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """What may say something: of every object its own words first, then those further in. Echoes of the request are not entered."""
    if depth > 6:
        return
    if isinstance(found, list):
        for entry in found[:8]:
            yield from _leaves(entry, key, depth + 1)
    elif isinstance(found, dict):
        place = found.get("loc")
        if isinstance(place, list) and isinstance(found.get("msg"), str):
            where = ".".join(str(part) for part in place if part != "body")
            yield "msg", f"{where}: {found['msg']}" if where else found["msg"]
            return
        for name, value in found.items():
            if name in ("input", "ctx", "body", "request", "metadata", "param", "choices"):
                continue
            if isinstance(value, (dict, list)):
                yield from _leaves(value, name, depth + 1)
            else:
                yield name, value
    else:
        yield key, found
