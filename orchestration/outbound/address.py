"""Where a `callback_url` may lead: public addresses only, unless the settings name the network. Whoever submits a turn chooses the URL, so
without this they would make us call our own network.

A name is looked up when a call is made, and the call goes to the very address that was checked.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

from orchestration.core.errors import Invalid, Misconfigured, TurnmillError

#: The longest URL that is taken, in characters.
MAX_URL_CHARS = 2048

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

#: IPv6 networks that carry an IPv4 address in their last 32 bits.
_CARRIERS = tuple(ipaddress.IPv6Network(text) for text in ("64:ff9b::/96", "::ffff:0:0/96", "::/96"))


#: Networks that are no longer given out and that Python counts as public: site-local addresses, and the way to any 6to4 relay.
_RETIRED = tuple(ipaddress.ip_network(text) for text in ("fec0::/10", "192.88.99.0/24"))

#: What a host may be made of; an address of IPv6 has colons too. An escape (`%31`) is nothing that a resolver knows.
_HOST = re.compile(r"[A-Za-z0-9._-]+")


class AddressRefused(TurnmillError):
    """A `callback_url` leads where it must not. No connection was made."""

    code = "callback_refused"


@dataclass(frozen=True, slots=True)
class Place:
    """A URL's parts, as far as a connection needs them."""

    url: str
    host: str
    port: int
    secure: bool


def check_url(url: str, networks: Sequence[str]) -> Place:
    """The parts of a URL that may be called, as far as can be told without looking its name up.

    Args:
        networks: those that may be called although they are not public.

    Raises:
        Invalid: it cannot be a `callback_url`; says why.
    """
    try:
        place = _place(url)
        address = _literal(place.host)
        if address is not None:
            _refuse_inside(address, parse_networks(tuple(networks)))
        elif _is_local_name(place.host) and not networks:
            raise AddressRefused("it leads to this machine")
    except AddressRefused as error:
        raise Invalid(f"the callback_url does not fit: {error}", [{"loc": ["callback_url"], "msg": str(error)}]) from None
    return place


def resolve(place: Place, networks: Sequence[str]) -> list[str]:
    """The addresses behind a place, looked up now, in the order in which they should be tried.

    Raises:
        AddressRefused: one of them is not public.
        OSError: the name cannot be looked up.
    """
    allowed = parse_networks(tuple(networks))
    found: list[str] = []
    for *_, where in socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP):
        address = ipaddress.ip_address(str(where[0]).partition("%")[0])
        _refuse_inside(address, allowed)
        if str(address) not in found:
            found.append(str(address))
    return found


@lru_cache(maxsize=64)
def parse_networks(texts: tuple[str, ...]) -> tuple[Network, ...]:
    """The networks of a setting; raises Misconfigured for one that is none."""
    try:
        return tuple(ipaddress.ip_network(text, strict=False) for text in texts)
    except ValueError:
        raise Misconfigured("TURNMILL_CALLBACK_NETWORKS: comma-separated networks are expected, such as 10.1.0.0/16") from None


def is_public(address: Address) -> bool:
    """Whether an address is one of the public internet, and not another one in disguise."""
    if isinstance(address, ipaddress.IPv6Address):
        embedded = address.sixtofour or (address.teredo or (None, None))[1]
        if embedded is None and any(address in carrier for carrier in _CARRIERS):
            embedded = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if embedded is not None:
            return is_public(embedded)
    if any(address in network for network in _RETIRED if network.version == address.version):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _place(url: str) -> Place:
    if not 0 < len(url) <= MAX_URL_CHARS or not url.isascii() or any(char <= " " or char in '\\"<>^`{|}' for char in url):
        raise AddressRefused(f"at most {MAX_URL_CHARS} printable ASCII characters")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise AddressRefused("it is no URL") from None
    if parts.scheme not in ("http", "https"):
        raise AddressRefused("only http and https")
    if "@" in parts.netloc:
        raise AddressRefused("no user or password in it")
    if not parts.hostname or port == 0:
        raise AddressRefused("it names no host")
    bracketed = parts.netloc.startswith("[")
    if bracketed != (":" in parts.hostname) or (not bracketed and not _HOST.fullmatch(parts.hostname)):
        raise AddressRefused("its host is no name and no address")
    secure = parts.scheme == "https"
    return Place(url, parts.hostname.rstrip("."), port or (443 if secure else 80), secure)


def _literal(host: str) -> Address | None:
    """The address that a host is, in any of the forms that a resolver takes (`127.1`, `0x7f000001`); None for a name."""
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        pass
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except (OSError, ValueError):
        return None


def _is_local_name(host: str) -> bool:
    return host == "localhost" or host.endswith((".localhost", ".local", ".internal"))


def _refuse_inside(address: Address, allowed: Sequence[Network]) -> None:
    mapped = getattr(address, "ipv4_mapped", None)
    forms = [form for form in (address, mapped) if form is not None]
    if is_public(address) or any(form in network for network in allowed for form in forms if form.version == network.version):
        return
    raise AddressRefused("it leads to an address that is not public")
