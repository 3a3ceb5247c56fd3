"""Pages of other origins (CORS): none may call the gateway unless the settings name their origin. Cookies are never taken."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from orchestration.core.errors import Misconfigured

_SENT = ["Authorization", "Content-Type", "Idempotency-Key", "Last-Event-ID", "Prefer", "traceparent", "Turnmill-Conversation"]
_READ = [
    "Location",
    "Preference-Applied",
    "RateLimit-Limit",
    "RateLimit-Policy",
    "RateLimit-Remaining",
    "RateLimit-Reset",
    "Retry-After",
    "Turnmill-Conversation",
    "Turnmill-Turn",
]


def cross_origin(app: FastAPI, origins: Sequence[str]) -> None:
    """Let pages of `origins` call `app`; raises Misconfigured for one that is no origin."""
    for origin in origins:
        if not re.fullmatch(r"https?://[A-Za-z0-9._-]+(:[0-9]{1,5})?|https?://\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?", origin):
            raise Misconfigured(f"TURNMILL_CORS_ORIGINS: {origin!r} is no origin such as https://app.example.com")
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=_SENT,
            expose_headers=_READ,
            max_age=600,
        )
