"""Routes of the console's three files. Nothing is built, nothing comes from elsewhere, and its policy lets nothing else run."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fastapi import APIRouter, Response

router = APIRouter(tags=["console"], include_in_schema=False)

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

_TYPES = {"index.html": "text/html", "console.js": "text/javascript", "console.css": "text/css"}


@router.get("/")
def index() -> Response:
    """The page."""
    return _file("index.html")


@router.get("/console/console.js")
def script() -> Response:
    """What it does."""
    return _file("console.js")


@router.get("/console/console.css")
def style() -> Response:
    """What it looks like."""
    return _file("console.css")


def _file(name: str) -> Response:
    headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"}
    return Response(_text(name), headers=headers, media_type=_TYPES[name])


@cache
def _text(name: str) -> bytes:
    return (Path(__file__).parent / name).read_bytes()
