"""`turnmill approvals …`: what waits for a human, and the human's answer, over the REST API. Whoever the API key stands for decides, so
the audit stream names them.

What is shown comes from a model: it is never taken for markup or for orders to the terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestration.core.errors import Invalid
from orchestration.settings import load_settings

if TYPE_CHECKING:
    from orchestration.clients.approvals import ApprovalsClient

#: Where a gateway in development is.
DEVELOPMENT_URL = "http://127.0.0.1:8000"

#: Columns of output that goes into a file or a pipe.
WIDE = 240

#: Characters of arguments in a list.
MAX_LISTED_CHARS = 120

approvals = typer.Typer(help="What waits for a human, and the human's answer.", no_args_is_help=True)

Url = Annotated[str, typer.Option("--url", help=f"The gateway; by default TURNMILL_PUBLIC_URL, else {DEVELOPMENT_URL}.")]
Key = Annotated[
    str, typer.Option("--key", envvar="TURNMILL_API_KEY", help="An API key; better in the environment than on the command line.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one approval a line.")]
Id = Annotated[str, typer.Argument(help="Its id, from `turnmill approvals list`.")]


@approvals.command("list")
def list_them(
    url: Url = "",
    key: Key = "",
    state: Annotated[str, typer.Option(help="pending, held, approved, denied, expired or cancelled.")] = "pending",
    agent: Annotated[str, typer.Option(help="Only those of one agent.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="How many at most.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List approvals in one state, the oldest first."""
    with _client(url, key) as client:
        found = client.every(state, agent, limit)
        if as_json:
            _print_json(found)
        else:
            _print_table(list(found), state)


@approvals.command()
def show(approval_id: Id, url: Url = "", key: Key = "", as_json: AsJson = False) -> None:
    """Show one approval with the whole call."""
    with _client(url, key) as client:
        _print_one(client.get(approval_id), as_json)


@approvals.command()
def approve(
    approval_id: Id,
    url: Url = "",
    key: Key = "",
    arguments: Annotated[str, typer.Option(help="What is to run instead: a JSON object, or @FILE with one.")] = "",
    note: Annotated[str, typer.Option(help="Kept with the decision.")] = "",
    as_json: AsJson = False,
) -> None:
    """Let the call run, perhaps with other arguments."""
    edited = _arguments(arguments)
    with _client(url, key) as client:
        _print_one(client.decide(approval_id, True, arguments=edited, note=note), as_json)


@approvals.command()
def deny(
    approval_id: Id,
    url: Url = "",
    key: Key = "",
    note: Annotated[str, typer.Option(help="Why; the model reads it.")] = "",
    as_json: AsJson = False,
) -> None:
    """Keep the call from running."""
    with _client(url, key) as client:
        _print_one(client.decide(approval_id, False, note=note), as_json)


@approvals.command()
def reopen(
    approval_id: Id,
    url: Url = "",
    key: Key = "",
    timeout_s: Annotated[float | None, typer.Option(help="Seconds until it expires; by default as its gate says.")] = None,
    as_json: AsJson = False,
) -> None:
    """Have a held approval asked again."""
    with _client(url, key) as client:
        _print_one(client.reopen(approval_id, timeout_s), as_json)


def _client(url: str, key: str) -> ApprovalsClient:
    from orchestration.clients.approvals import ApprovalsClient

    return ApprovalsClient(url or load_settings().public_url or DEVELOPMENT_URL, key)


def _arguments(text: str) -> dict[str, Any] | None:
    if not text:
        return None
    try:
        value = json.loads(Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text)
    except OSError as error:
        raise Invalid(f"--arguments: {error.strerror or type(error).__name__}: {text[1:]}") from None
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise Invalid("--arguments: a JSON object is expected, or @FILE with one")
    return value


def _print_json(found: Iterable[Mapping[str, Any]]) -> None:
    for one in found:
        print(json.dumps(one))


def _print_table(found: list[dict[str, Any]], state: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else WIDE, markup=False, highlight=False)
    if not found:
        console.print(f"no approval is {state}")
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("ID", overflow="fold", min_width=max(len(one["approval_id"]) for one in found))
    for heading in ("REQUESTED", "EXPIRES", "AGENT", "TOOL", "ARGUMENTS"):
        table.add_column(heading, overflow="fold")
    for one in found:
        arguments = _shown(json.dumps(one["arguments"], ensure_ascii=False))
        cut = arguments if len(arguments) <= MAX_LISTED_CHARS else f"{arguments[:MAX_LISTED_CHARS]}…"
        cells = (one["approval_id"], one["requested_at"] or "", one["expires_at"] or "never", one["agent"], one["prefix"], cut)
        table.add_row(*(_text(cell) for cell in cells))
    console.print(table)


def _print_one(approval: dict[str, Any], as_json: bool) -> None:
    if as_json:
        _print_json([approval])
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else WIDE, markup=False, highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _facts(approval):
        table.add_row(name, _text(value))
    console.print(table)


def _facts(approval: dict[str, Any]) -> list[tuple[str, str]]:
    facts = [
        ("id", approval["approval_id"]),
        ("state", approval["state"]),
        ("tool", approval["prefix"]),
        ("reason", approval["reason"]),
        ("agent", approval["agent"]),
        ("submitted by", approval["submitted_by"]),
        ("turn", approval["turn_id"]),
        ("conversation", approval["conversation_id"]),
        ("roles", ", ".join(approval["roles"]) or "anybody who may decide"),
        ("requested", approval["requested_at"] or ""),
        ("expires", approval["expires_at"] or "never"),
        ("escalated from", approval["escalated_from"] or ""),
        ("quorum", str(approval["quorum"]) if approval["quorum"] > 1 else ""),
        ("arguments", json.dumps(approval["arguments"], ensure_ascii=False, indent=2)),
    ]
    for one in approval["decisions"]:
        note = f": {one['note']}" if one["note"] else ""
        facts.append(("approved" if one["approved"] else "denied", f"by {one['by']} at {one['at']}{note}"))
    return [(name, value) for name, value in facts if value]


def _text(value: str) -> Any:
    from rich.text import Text

    return Text(_shown(value))


def _shown(text: str) -> str:
    """`text` without the characters that a terminal takes for orders, or that reverse what is read."""
    return "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text)
