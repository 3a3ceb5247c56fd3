"""One POST to a `callback_url`: to an address that was checked, without proxies, redirects or patience."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence

import httpx

from orchestration.outbound.address import AddressRefused, Place, resolve
from orchestration.outbound.told import Told

#: How long one call may take, whatever the other side does, in seconds.
LIMIT_S = 20.0

#: The longest pause that the other side may ask for, in seconds.
MAX_ASKED_FOR_S = 3600.0


def post(place: Place, headers: Mapping[str, str], body: str, networks: Sequence[str]) -> Told:
    """Call once and say what came of it. Any status of 2xx is a delivery; 410 asks us to stop. Never raises."""
    try:
        return asyncio.run(asyncio.wait_for(_post(place, headers, body.encode(), networks), LIMIT_S))
    except TimeoutError:
        return Told("timeout")
    except AddressRefused as error:
        return Told(error.code, for_good=True)
    except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError, OSError, UnicodeError) as error:
        return Told(f"unreachable ({type(error).__name__})")


async def _post(place: Place, headers: Mapping[str, str], body: bytes, networks: Sequence[str]) -> Told:
    addresses = await asyncio.to_thread(resolve, place, networks)
    failure: httpx.TransportError | None = None
    async with httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=httpx.Timeout(10.0, connect=5.0)) as client:
        for address in addresses[:3]:
            request = client.build_request("POST", httpx.URL(place.url).copy_with(host=address), headers=dict(headers), content=body)
            # The name must still be the one that the server and its certificate know.
            request.headers["host"] = _host_header(place)
            request.extensions = {**request.extensions, "sni_hostname": place.host}
            try:
                response = await client.send(request, stream=True)
            except httpx.ConnectError as error:
                failure = error
                continue
            try:
                return _told(response)
            finally:
                await response.aclose()  # what it answers is not read: nobody would look at it
    raise failure or httpx.ConnectError("the name has no address")


def _told(response: httpx.Response) -> Told:
    status = response.status_code
    if 200 <= status < 300:
        return Told()
    return Told(f"status {status}", for_good=status == 410, asked_for_s=_asked_for_s(response.headers.get("retry-after", "")))


def _asked_for_s(text: str) -> float:
    try:
        return min(max(float(text), 0.0), MAX_ASKED_FOR_S)
    except ValueError:
        return 0.0


def _host_header(place: Place) -> str:
    host = f"[{place.host}]" if ":" in place.host else place.host
    return host if place.port == (443 if place.secure else 80) else f"{host}:{place.port}"
