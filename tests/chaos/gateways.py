"""The clients' way in: several gateways, of which one is asked; a client that gets no answer, or 503, asks again, perhaps another."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import httpx

from tests.chaos.record import Record

#: How long a client waits for a byte before it gives a connection up, in seconds.
SILENCE_S = 9.0


class Gateways:
    """HTTP clients of the deployment's gateways; an asynchronous context manager.

    Args:
        chance: chooses the gateway and the pauses.
    """

    def __init__(self, urls: Sequence[str], chance: random.Random, record: Record) -> None:
        timeout = httpx.Timeout(SILENCE_S, connect=2.0)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=5)
        self._clients = [httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits, trust_env=False) for url in urls]
        self._chance = chance
        self._record = record
        #: How long a request is tried, in seconds; None, as long as things are being broken, for ever.
        self.patience_s: float | None = None

    def any(self) -> httpx.AsyncClient:
        """A client of one of them."""
        return self._chance.choice(self._clients)

    async def pause(self) -> None:
        """The time between two tries."""
        await asyncio.sleep(self._chance.uniform(0.1, 0.7))

    async def ask(
        self, method: str, path: str, *, body: Any = None, headers: dict[str, str] | None = None, once: bool = False
    ) -> httpx.Response | None:
        """The first real answer to a request; None when it is sent `once` and got none, so that it may have been heard or not.

        Raises:
            AssertionError: nothing is broken any more, and still there is none.
        """
        began = time.monotonic()
        while True:
            try:
                answer = await self.any().request(method, path, json=body, headers=headers)
            except httpx.TransportError as error:
                self._record.answers[type(error).__name__] += 1
            else:
                self._record.answers[str(answer.status_code)] += 1
                if answer.status_code == 503 and "Retry-After" not in answer.headers:
                    self._record.fault(f"503 without Retry-After: {method} {path}")
                if answer.status_code == 500:
                    self._record.fault(f"500 from the gateway: {method} {path}: {answer.text[:300]}")
                if answer.status_code not in (500, 503):
                    return answer
            if once:
                return None
            if self.patience_s is not None and time.monotonic() - began > self.patience_s:
                raise AssertionError(f"no answer: {method} {path}")
            await self.pause()

    async def read(self, path: str) -> Any:
        """What a GET of `path` shows once it is answered; raises AssertionError when it is not 200."""
        answer = await self.ask("GET", path)
        assert answer is not None and answer.status_code == 200, (path, answer and answer.text)
        return answer.json()

    async def __aenter__(self) -> Gateways:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for client in self._clients:
            await client.aclose()
