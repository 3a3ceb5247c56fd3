"""What the routes work with: one value per gateway process, made when it starts and found through the request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, cast

from fastapi import Depends
from starlette.requests import HTTPConnection

from orchestration.core.errors import NotFound
from orchestration.core.ids import is_id
from orchestration.state.frame_hub import FrameHub
from orchestration.wiring import Ports

if TYPE_CHECKING:
    from gateway.auth import Door
    from gateway.metrics import Meters
    from gateway.proxies import Proxies
    from gateway.rates import Brake
    from gateway.webhooks.routes import OpenHook


@dataclass(frozen=True, slots=True)
class Pace:
    """Times of streams, in seconds: silence after which a comment line is sent, how long a client may take to accept a piece until it is
    cut off, how long it then has to hear of that until it is hung up on, and how often it is looked whether its caller's key still holds.
    """

    comment_s: float = 15.0
    send_s: float = 20.0
    linger_s: float = 300.0
    recheck_s: float = 15.0


@dataclass(frozen=True, slots=True)
class Parts:
    """The ports, the frame hub, who may come in and how often, the webhooks with their secrets, the proxies, and the meters."""

    ports: Ports
    hub: FrameHub
    door: Door
    brake: Brake
    hooks: Mapping[str, OpenHook]
    proxies: Proxies
    meters: Meters
    pace: Pace


def parts_of(connection: HTTPConnection) -> Parts:
    """The parts of the process that serves this request or WebSocket."""
    return cast(Parts, connection.app.state.parts)


async def _parts(connection: HTTPConnection) -> Parts:
    # Async, since a plain function would be called in a thread, for each request.
    return parts_of(connection)


#: A route's parameter with the process's parts.
GatewayParts = Annotated[Parts, Depends(_parts)]


def known_id(text: str, what: str) -> str:
    """`text` if it can be an id at all; raises NotFound otherwise, as for an id that nothing has."""
    if not is_id(text):
        raise NotFound(f"there is no such {what}")
    return text
