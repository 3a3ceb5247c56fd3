"""What is this machine and what is not: addresses, the hosts that a server was told to serve, and requests that may come from elsewhere.

It matters to a gateway without keys, which serves this machine alone.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

#: Headers that a proxy or a tunnel leaves on what it brings from elsewhere; beside these all that begin with `x-forwarded-`.
_OF_PROXIES = frozenset({"forwarded", "via", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip", "cf-ray"})


def is_loopback(host: str) -> bool:
    """Whether this address or host name is this machine's own."""
    name = host.strip().strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def served_hosts(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The addresses that this process's server was told to listen on, as far as its command line and environment say."""
    found = [environ["UVICORN_HOST"]] if environ.get("UVICORN_HOST") else []
    for place, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name == "--host":
            found.append(value if equals else "".join(argv[place + 1 : place + 2]))
        elif name in ("-b", "--bind") and "gunicorn" in argv[0]:
            address = value if equals else "".join(argv[place + 1 : place + 2])
            found.append(address.rpartition(":")[0] or address)
    return [host for host in found if host]


def not_local(request: HTTPConnection) -> str:
    """Why this request or WebSocket may not come from this machine; empty when it does."""
    client, server = request.scope.get("client"), request.scope.get("server")
    if not client or not is_loopback(client[0]):
        return "this request comes from elsewhere"
    if server and server[1] is not None and not is_loopback(server[0]):
        return "this request came in on another address"
    # A web page may make a browser on this machine send requests here: under a name of its own (DNS rebinding) or from its own origin.
    if not is_loopback(_host_of(request.headers.get("host", ""))):
        return "its Host is not loopback"
    if "origin" in request.headers and not is_loopback(_host_of(request.headers["origin"])):
        return "its Origin is not loopback"
    if request.headers.get("sec-fetch-site") == "cross-site":
        return "a page of another site sent it"
    if any(name in _OF_PROXIES or name.startswith("x-forwarded-") for name in request.headers):
        return "this request came through a proxy"
    return ""


def _host_of(address: str) -> str:
    """The host in a Host or Origin header; empty when it is none."""
    try:
        parts = urlsplit(address if "//" in address else f"//{address}")
        return (parts.hostname or "") if parts.port is None or parts.port >= 0 else ""
    except ValueError:
        return ""
