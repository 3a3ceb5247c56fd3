"""Who is called back in a chaos run: an HTTP server that checks each call, refuses some of them once, and notes them all."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from standardwebhooks import Webhook, WebhookVerificationError

#: Signs the calls of the run.
SECRET = "whsec_Y2hhb3MgY2hhb3MgY2hhb3MgY2hhb3MgY2hhb3M="

#: How many deliveries out of a hundred are refused, or cut off, at their first attempt.
REFUSED, CUT_OFF = 5, 3


@dataclass(frozen=True, slots=True)
class Call:
    """One call: its message's id, what it says, and whether it was answered with 200."""

    message_id: str
    type: str
    data: dict[str, Any]
    taken: bool

    @property
    def subject(self) -> str:
        """The turn or approval that it tells of."""
        return str(self.data["turn_id"] if self.type == "turn.ended" else self.data["approval_id"])


class Receiver:
    """A context manager; `calls` and `faults` may be read at any time."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._lock = threading.Lock()
        self.calls: list[Call] = []
        self.faults: list[str] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver._heard(self)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/told"

    def __enter__(self) -> Receiver:
        threading.Thread(target=self._server.serve_forever, name="receiver", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _heard(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["content-length"]))
        message_id = request.headers["webhook-id"]
        try:
            Webhook(SECRET).verify(body, dict(request.headers.items()))
        except WebhookVerificationError as error:
            self.faults.append(f"a call whose signature does not hold: {message_id}, {error}")
        told = json.loads(body)
        with self._lock:
            first = all(call.message_id != message_id for call in self.calls)
            fate = random.Random(f"{self._seed}/{message_id}").randrange(100) if first else 100
            self.calls.append(Call(message_id, told["type"], told["data"], fate >= REFUSED + CUT_OFF))
        if fate < CUT_OFF:
            request.connection.close()
            return
        request.send_response(500 if fate < REFUSED + CUT_OFF else 200)
        request.send_header("content-length", "0")
        request.end_headers()
