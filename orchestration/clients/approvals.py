"""Approvals of a deployment over its REST API, for a person's tools: list, read, decide, reopen. Whoever the API key stands for decides."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx

from orchestration.core.errors import TurnmillError

#: Approvals that one request reads.
PAGE = 200


class ApiRefused(TurnmillError):
    """The gateway refused what was asked; the message is its own, `api_code` its code and `status` the HTTP status."""

    code = "api_refused"

    def __init__(self, message: str, code: str, status: int) -> None:
        super().__init__(f"{message} ({code})" if code else message)
        self.api_code = code
        self.status = status


class ApiUnreachable(TurnmillError):
    """The gateway did not answer, or not as a gateway does. Whether a decision was recorded is not known."""

    code = "api_unreachable"


class ApprovalsClient:
    """A connection to one gateway; a context manager. Not for use from several threads.

    Args:
        url: where the gateway is, for example `https://turnmill.example.com`.
        key: an API key or JWT; empty for a gateway that asks for none.
        transport: in place of the network, for tests.
    """

    def __init__(self, url: str, key: str = "", *, timeout_s: float = 30.0, transport: httpx.BaseTransport | None = None) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=timeout_s, transport=transport)

    def __enter__(self) -> ApprovalsClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()

    def every(self, state: str = "pending", agent: str = "", most: int = 1000) -> Iterator[dict[str, Any]]:
        """The approvals in one state, oldest first, at most `most`; read page by page."""
        cursor, left = "", most
        while left > 0:
            wanted = {"state": state, "limit": str(min(PAGE, left))} | ({"agent": agent} if agent else {})
            page = self._ask("GET", "/v1/approvals", params=wanted | ({"cursor": cursor} if cursor else {}))
            yield from page["approvals"]
            left -= len(page["approvals"])
            cursor = page["cursor"] or ""
            if not cursor:
                return

    def get(self, approval_id: str) -> dict[str, Any]:
        """One approval."""
        return self._ask("GET", f"/v1/approvals/{quote(approval_id, safe='')}")

    def decide(self, approval_id: str, approved: bool, *, arguments: dict[str, Any] | None = None, note: str = "") -> dict[str, Any]:
        """Approve, perhaps with other arguments, or deny; the approval as it stands then."""
        body: dict[str, Any] = {"approved": approved}
        if arguments is not None:
            body["arguments"] = arguments
        if note:
            body["note"] = note
        return self._ask("POST", f"/v1/approvals/{quote(approval_id, safe='')}/decision", json=body)

    def reopen(self, approval_id: str, timeout_s: float | None = None) -> dict[str, Any]:
        """Have a held approval asked again."""
        body = {"timeout_s": timeout_s} if timeout_s is not None else {}
        return self._ask("POST", f"/v1/approvals/{quote(approval_id, safe='')}/reopen", json=body)

    def _ask(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, **more)
            answer = response.json()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ApiUnreachable(f"the gateway at {self._http.base_url} does not answer ({type(error).__name__})") from None
        except ValueError:
            raise ApiUnreachable(f"what answers at {self._http.base_url} is no gateway of Turnmill") from None
        if not isinstance(answer, dict):
            raise ApiUnreachable(f"what answers at {self._http.base_url} is no gateway of Turnmill")
        if response.status_code >= 400:
            detail = str(answer.get("detail") or answer.get("title") or "refused")
            raise ApiRefused(detail, str(answer.get("code", "")), response.status_code)
        return answer
