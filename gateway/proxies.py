"""Proxies in front of the gateway: whose forwarded headers are believed, under which URL a client called, and from where.

Who a request's principal is does not depend on any of this.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from starlette.requests import HTTPConnection

from orchestration.core.errors import Misconfigured
from orchestration.settings import Settings

_HOST = re.compile(r"[A-Za-z0-9._-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")


class Proxies:
    """What the settings say about proxies; raises Misconfigured for an address or URL that is none."""

    def __init__(self, settings: Settings) -> None:
        self._networks = [_network(text) for text in settings.trusted_proxies]
        self._public_url = settings.public_url.rstrip("/")
        if self._public_url and not re.match(r"https?://[^\s/?#]+", self._public_url):
            raise Misconfigured("TURNMILL_PUBLIC_URL: an http:// or https:// URL was expected")

    @property
    def secure(self) -> bool:
        """Whether clients come over TLS, as far as the settings say."""
        return self._public_url.startswith("https://")

    def urls(self, connection: HTTPConnection) -> tuple[str, ...]:
        """The URLs that a client may have called, likeliest first: the public one, the forwarded one, the request's own."""
        scope = connection.scope
        path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
        query = scope.get("query_string", b"").decode("latin-1")
        place = f"{path}?{query}" if query else path
        host = connection.headers.get("host", "")
        bases = [self._public_url] if self._public_url else []
        if self._believes(connection):
            scheme = _first(connection.headers.get("x-forwarded-proto", "")).lower() or scope["scheme"]
            forwarded = _first(connection.headers.get("x-forwarded-host", "")) or host
            if scheme in ("http", "https") and _HOST.fullmatch(forwarded):
                bases.append(f"{scheme}://{forwarded}")
        if _HOST.fullmatch(host):
            bases.append(f"{scope['scheme']}://{host}")
        return tuple(dict.fromkeys(base + place for base in bases))

    def from_where(self, way: str, connection: HTTPConnection) -> str:
        """From where somebody acts, for the audit stream: the way in, and the client's address as far as it is known."""
        client = connection.scope.get("client")
        if not client:
            return way
        address = str(client[0])
        if _within(address, self._networks):
            said = [part.strip() for part in connection.headers.get("x-forwarded-for", "").split(",")]
            # what stands left of the last address that no proxy of ours has could have been written by anybody
            address = next((part for part in reversed(said) if _is_address(part) and not _within(part, self._networks)), address)
        return f"{way}:{address}"

    def _believes(self, connection: HTTPConnection) -> bool:
        client = connection.scope.get("client")
        if not client:
            return False
        # uvicorn itself replaces the address by the forwarded one where it trusts its peer, and gives it port 0, which no connection has.
        return client[1] == 0 or _within(client[0], self._networks)


def _within(address: str, networks: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]) -> bool:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    found = getattr(found, "ipv4_mapped", None) or found
    return any(found in network for network in networks if network.version == found.version)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise Misconfigured(f"TURNMILL_TRUSTED_PROXIES: {text!r} is no address or network") from None


def _first(header: str) -> str:
    return header.partition(",")[0].strip()
