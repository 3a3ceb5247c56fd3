"""The route of tickets: what a browser shows to streams and channels, where it cannot set a header."""

from __future__ import annotations

from fastapi import APIRouter, Response

from gateway.auth import AnyCaller
from gateway.bodies import json_answer
from gateway.parts import GatewayParts
from gateway.shapes import Ticket

router = APIRouter(prefix="/v1/tickets", tags=["tickets"])


@router.post("", summary="Get a ticket", response_model=Ticket)
def issue_ticket(caller: AnyCaller, parts: GatewayParts) -> Response:
    """A ticket for one stream or channel, good once and for a minute, with the rights of whoever asks for it."""
    ticket, expires_at = parts.door.issue_ticket(caller)
    return json_answer({"ticket": ticket, "expires_at": expires_at})
