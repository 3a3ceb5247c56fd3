"""What the routes work with: one value per gateway process, made when it starts and found through the request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, cast

from fastapi import Depends, Request

from orchestration.core.errors import NotFound
from orchestration.core.ids import is_id
from orchestration.state.frame_hub import FrameHub
from orchestration.wiring import Ports

if TYPE_CHECKING:
    from gateway.auth import Door
    from gateway.webhooks.routes import OpenHook


@dataclass(frozen=True, slots=True)
class Pace:
    """Times of streams, in seconds: silence after which a comment line is sent, and how long a client may take to accept a piece."""

    comment_s: float = 15.0
    send_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Parts:
    """The ports, the frame hub, who may come in, and the webhooks with their secrets."""

    ports: Ports
    hub: FrameHub
    door: Door
    hooks: Mapping[str, OpenHook]
    pace: Pace


def _parts(request: Request) -> Parts:
    return cast(Parts, request.app.state.parts)


#: A route's parameter with the process's parts.
GatewayParts = Annotated[Parts, Depends(_parts)]


def known_id(text: str, what: str) -> str:
    """`text` if it can be an id at all; raises NotFound otherwise, as for an id that nothing has."""
    if not is_id(text):
        raise NotFound(f"there is no such {what}")
    return text
