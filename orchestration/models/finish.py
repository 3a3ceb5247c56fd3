"""Why an answer ended, in one vocabulary: `stop`, `tool_calls`, `length`, `content_filter`; and what an answer counts in tokens.

Servers label answers in many words, and wrongly; what was sent decides before the label.
"""

from __future__ import annotations

import math
from typing import Any

from orchestration.core.errors import ModelError
from orchestration.core.model import ModelFault, Usage
from orchestration.models.text_pieces import sound

_MEANS = {
    **dict.fromkeys(("stop", "end_turn", "eos", "eos_token", "stop_sequence", "complete", "completed", "done", "end"), "stop"),
    **dict.fromkeys(("length", "max_tokens", "model_length", "max_output_tokens", "model_context_window_exceeded", "incomplete"), "length"),
    **dict.fromkeys(
        ("content_filter", "safety", "recitation", "refusal", "sensitive", "prohibited_content", "blocklist", "spii"), "content_filter"
    ),
    **dict.fromkeys(("tool_calls", "tool_call", "function_call", "tool_use", "tool"), "tool_calls"),
}

#: Labels that say that the server failed.
_FAILED = {
    "error": ModelFault.UNAVAILABLE,
    "network_error": ModelFault.UNAVAILABLE,
    "insufficient_system_resource": ModelFault.UNAVAILABLE,
    "abort": ModelFault.TRUNCATED,
    "aborted": ModelFault.TRUNCATED,
    "cancelled": ModelFault.TRUNCATED,
}


def finish_reason(who: str, label: str, *, calls: bool) -> str:
    """What is to be acted on, from the server's label and from whether tools were asked for.

    Raises:
        ModelError: the label says that the server failed or stopped half-way.
    """
    label = label.strip().lower()
    if label in _FAILED:
        raise ModelError(_FAILED[label], f"{who} ended its answer with {label!r}", retryable=True)
    meaning = _MEANS.get(label, label or "stop")
    if calls and meaning not in ("length", "content_filter"):
        return "tool_calls"
    if not calls and meaning == "tool_calls":
        return "stop"
    return sound(meaning[:64])


def chat_usage(found: Any) -> Usage | None:
    """The tokens of a chat-completions `usage` object, or None when it is none."""
    if not isinstance(found, dict):
        return None
    asked = found.get("prompt_tokens_details") or found.get("input_tokens_details")
    answered = found.get("completion_tokens_details") or found.get("output_tokens_details")
    return Usage(
        input_tokens=count(found.get("prompt_tokens", found.get("input_tokens"))),
        output_tokens=count(found.get("completion_tokens", found.get("output_tokens"))),
        cached_tokens=count(asked.get("cached_tokens") if isinstance(asked, dict) else None)
        or count(found.get("prompt_cache_hit_tokens"))
        or count(found.get("cached_tokens")),
        reasoning_tokens=count(answered.get("reasoning_tokens") if isinstance(answered, dict) else None),
    )


def count(value: Any) -> int:
    """A number of tokens, perhaps as text; what is none, or below zero, counts as 0. Never above what every store and client takes."""
    if isinstance(value, str) and len(value) < 16 and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (isinstance(value, float) and not math.isfinite(value)):
        return 0
    return max(0, min(int(value), 2**53 - 1))
