"""What `make demo` runs: a deployment of real processes on free ports, and the outside world that talks to it, printed as it happens.

A customer's signed message asks for a refund and a sum; a human corrects the refund; the model answers. Without `OPENAI_BASE_URL` or
`TURNMILL_DEMO_MODEL` the model is `examples/model_server.py`; with one of them it is a real one.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.text import Text
from standardwebhooks import Webhook

from orchestration.core.errors import Misconfigured
from orchestration.testing.parts import NotReady, answers_http, wait_until
from orchestration.testing.servers import free_port
from orchestration.testing.stack import Stack

ROOT = Path(__file__).resolve().parent.parent

TEXT = "Please refund my order o-42, it cost me 25.50 euros. And what is 19.5 plus 22.5?"

#: What the human makes of the 25.50 that the customer asked for.
CORRECTED_AMOUNT = 19.9

#: Seconds to wait for any one thing; a real model may take its time.
PATIENCE_S = 120.0


class DemoFailed(Exception):
    """Something did not happen as it should; the message says what."""


def main() -> int:
    """Play the demo; returns the exit status: 0, or 1 with the ends of the logs printed."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    secret = "whsec_" + base64.b64encode(secrets.token_bytes(24)).decode()
    began = time.monotonic()
    try:
        with demo_stack(secret, console) as stack:
            try:
                play(stack, secret, console)
            except (DemoFailed, TimeoutError, httpx.HTTPError) as error:
                console.print(f"\nThe demo failed: {error}\n", style="bold red")
                console.print(stack.logs())
                return 1
    except (NotReady, Misconfigured, RuntimeError, OSError) as error:
        console.print(f"\nThe demo could not start: {error}", style="bold red")
        return 1
    except KeyboardInterrupt:
        return 130
    console.print(f"\nDone in {time.monotonic() - began:.0f} s, and every process has ended.", style="bold green")
    console.print("`make dev` runs the same and keeps it: http://127.0.0.1:8000 (Flower: http://127.0.0.1:5555)")
    return 0


@contextlib.contextmanager
def demo_stack(secret: str, console: Console) -> Iterator[Stack]:
    """The demo's processes, all ready. `secret` signs the shop's webhooks."""
    env = {"SHOP_SECRET": secret}
    model_port = free_port()
    real_model = os.environ.get("OPENAI_BASE_URL") or os.environ.get("TURNMILL_DEMO_MODEL")
    if real_model:  # OPENAI_API_KEY alone is no wish to spend money on a demo
        env["TURNMILL_DEMO_MODEL"] = os.environ.get("TURNMILL_DEMO_MODEL", "gpt-4o-mini")
        env["OPENAI_BASE_URL"] = os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1")
    else:
        env |= {"OPENAI_BASE_URL": f"http://127.0.0.1:{model_port}/v1", "OPENAI_API_KEY": "demo"}
    stack = Stack("examples.shop.agents", ["examples.shop.tools"], env=env, cwd=ROOT)
    try:
        console.print("Starting Redis, mesh hub, tool host, two workers and the gateway …", style="dim")
        if not real_model:
            command = [sys.executable, "-m", "examples.model_server", "--port", str(model_port)]
            stack.add("model", command, ready=lambda _log: answers_http(f"http://127.0.0.1:{model_port}/v1/models"))
        stack.start()
        console.print(f"Redis {stack.redis.url} · gateway {stack.url} · processes {', '.join(stack.names())}", style="dim")
        yield stack
    finally:
        stack.close()


def play(stack: Stack, secret: str, console: Console) -> dict[str, Any]:
    """The outside world: sends the message, follows the turn, decides, reads the turn; returns it. Raises DemoFailed."""
    with httpx.Client(base_url=stack.url, timeout=30) as client:
        _head(console, 1, f"A signed webhook arrives: {TEXT}")
        # a customer of its own, since a Redis server that is kept may have an earlier demo's turn waiting
        accepted = send_webhook(client, secret, {"customer": f"cu_{secrets.token_hex(4)}", "text": TEXT})
        turn_id = accepted["turn_id"]
        _head(console, 2, f"Enqueued, 202 at once: turn {turn_id}. Its stream, live:")
        watcher = Watcher(stack.url, turn_id, console)
        _head(console, 3, "plan: the model streams tokens and asks for tools of the mesh; the refund's owner wants a human")
        request = watcher.wait_for("approval_request")
        wait_until(lambda: client.get(f"/v1/turns/{turn_id}").json().get("state") == "waiting", "the turn waits for a human", PATIENCE_S)
        wait_until(lambda: not any(active_tasks(stack).values()), "no worker is held while the turn waits", PATIENCE_S)
        _head(console, 4, "The sum has run; the refund waits, suspended. Active tasks of the workers (celery inspect active):")
        for worker, tasks in sorted(active_tasks(stack).items()):
            console.print(f"    {worker}: {len(tasks) or 'none'}")
        listed = _ok(client.get("/v1/approvals", params={"state": "pending"}))
        approval = next((a for a in listed["approvals"] if a["approval_id"] == request["approval_id"]), None)
        if approval is None:
            raise DemoFailed("the approval is not in the list of pending ones")
        arguments = {**approval["arguments"], "amount": CORRECTED_AMOUNT}
        _head(console, 5, f"A human reads it over REST and corrects it: {approval['arguments']} -> {arguments}")
        decision = {"approved": True, "arguments": arguments, "note": "restocking fee kept"}
        settled = _ok(client.post(f"/v1/approvals/{approval['approval_id']}/decision", json=decision))
        console.print(f"    {settled['approval_id']} is {settled['state']}, decided by {settled['decided_by']}")
        watcher.wait_for("done")
        turn: dict[str, Any] = _ok(client.get(f"/v1/turns/{turn_id}"))
        _head(console, 6, f"GET /v1/turns/{turn_id}")
        console.print_json(json.dumps(turn))
        _check(turn)
        return turn


def send_webhook(client: httpx.Client, secret: str, message: dict[str, str], *, delivery_id: str | None = None) -> dict[str, Any]:
    """Send `message` as the shop would, signed in the Standard Webhooks form; returns what the gateway answered with its 202."""
    body = json.dumps(message)
    delivery = delivery_id or f"msg_{secrets.token_hex(8)}"
    now = datetime.now(UTC)
    headers = {
        "content-type": "application/json",
        "webhook-id": delivery,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": Webhook(secret).sign(delivery, now, body),
    }
    response = client.post("/v1/webhooks/shop", content=body, headers=headers)
    if response.status_code != 202:
        raise DemoFailed(f"the webhook was answered with {response.status_code}: {response.text[:300]}")
    return dict(response.json())


def active_tasks(stack: Stack) -> dict[str, list[Any]]:
    """The tasks that each worker runs right now, as Celery's own command tells."""
    result = stack.run("celery", "-A", "workers", "inspect", "active", "--json")
    with contextlib.suppress(ValueError):
        return dict(json.loads(result.stdout))
    raise DemoFailed(f"`celery -A workers inspect active` says: {(result.stdout + result.stderr)[-300:]}")


class Watcher:
    """Follows a turn's stream in a thread, prints each frame as it comes, and keeps them all in `frames`."""

    def __init__(self, url: str, turn_id: str, console: Console) -> None:
        self.frames: list[dict[str, Any]] = []
        self._url = f"{url}/v1/turns/{turn_id}/frames"
        self._console = console
        self._in_text = False
        self._came: queue.SimpleQueue[dict[str, Any] | Exception] = queue.SimpleQueue()
        threading.Thread(target=self._follow, daemon=True).start()

    def wait_for(self, kind: str) -> dict[str, Any]:
        """The next frame of this kind. Raises DemoFailed when the turn ends before, or nothing comes for long."""
        while True:
            try:
                frame = self._came.get(timeout=PATIENCE_S)
            except queue.Empty:
                raise DemoFailed(f"no frame {kind!r} came within {PATIENCE_S:g} s") from None
            if isinstance(frame, Exception):
                raise DemoFailed(f"the stream broke off: {frame}")
            self.frames.append(frame)
            if frame["kind"] == kind:
                return frame
            if frame["kind"] == "done":
                raise DemoFailed(f"the turn ended ({frame.get('stop_reason')}) before a frame {kind!r} came")

    def _follow(self) -> None:
        try:
            with httpx.stream("GET", self._url, timeout=httpx.Timeout(30, read=PATIENCE_S)) as response:
                response.raise_for_status()
                for line in response.iter_lines():
                    if line.startswith("data:"):
                        frame = json.loads(line.removeprefix("data:"))
                        self._print(frame)
                        self._came.put(frame)
        except Exception as error:  # the waiting thread tells it
            self._came.put(error)

    def _print(self, frame: dict[str, Any]) -> None:
        kind = frame["kind"]
        if kind == "token":
            if not self._in_text:
                self._console.print(Text("    token              ", style="cyan"), end="")
            self._in_text = True
            self._console.print(frame["text"], end="")
            return
        if self._in_text:
            self._console.print()
            self._in_text = False
        told = {key: value for key, value in frame.items() if key not in ("kind", "seq", "ts", "turn_id", "round")}
        self._console.print(Text(f"    {kind:<18} ", style="cyan") + Text(json.dumps(told, ensure_ascii=False)))


def _check(turn: dict[str, Any]) -> None:
    refund = next((call for call in turn["calls"] if call["name"] == "billing-refund"), None)
    if turn["state"] != "completed" or not turn["answer"]:
        raise DemoFailed(f"the turn is {turn['state']} ({turn['stop_reason']})")
    if refund is None or refund["state"] != "completed" or refund["arguments"].get("amount") != CORRECTED_AMOUNT:
        raise DemoFailed("the refund did not run with the corrected amount")


def _head(console: Console, number: int, text: str) -> None:
    console.print(f"\n{number}. {text}", style="bold")


def _ok(response: httpx.Response) -> Any:
    if response.is_error:
        what = f"{response.request.method} {response.request.url.path}"
        raise DemoFailed(f"{what} was answered with {response.status_code}: {response.text[:300]}")
    return response.json()


if __name__ == "__main__":
    sys.exit(main())
