"""The `turnmill` command: serves tools, keeps the mesh's hub, runs a development deployment, makes API keys, decides approvals.

Each subcommand reads the settings and calls the one function that does it; what is wrong with the settings is one line and exit status 2.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestration.core.errors import Invalid, Misconfigured, TurnmillError
from orchestration.settings import Settings, load_settings
from workers.approvals_cli import approvals

if TYPE_CHECKING:
    from orchestration.state.store import Client

#: Where the mesh's hub listens when no setting says otherwise.
HUB = "tcp/127.0.0.1:7447"

app = typer.Typer(name="turnmill", help="AI-agent turns as durable work on a task queue.", no_args_is_help=True, add_completion=False)
keys = typer.Typer(help="API keys of the gateway.", no_args_is_help=True)
callbacks = typer.Typer(help="Signed calls to a turn's callback_url.", no_args_is_help=True)
app.add_typer(keys, name="keys")
app.add_typer(callbacks, name="callbacks")
app.add_typer(approvals, name="approvals")


def main() -> None:
    """The entry point of the `turnmill` command.

    What the user must mend is one line on standard error and exit status 2; another fault of Turnmill's is exit status 1.
    """
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # the user's modules are where they are, as for `celery` and `uvicorn`
    try:
        app()
    except (Misconfigured, Invalid) as error:
        print(f"turnmill: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except TurnmillError as error:
        print(f"turnmill: {error}", file=sys.stderr)
        raise SystemExit(1) from None


@app.command()
def tools(modules: Annotated[list[str], typer.Argument(help="Dotted paths of modules with @tool functions.")]) -> None:
    """Serve the tools of some modules on the mesh until SIGTERM or Ctrl-C."""
    from workers.tool_host.main import serve

    serve(modules, load_settings())


@app.command()
def mesh() -> None:
    """Keep the hub that the other processes connect to, until SIGTERM or Ctrl-C.

    It listens on TURNMILL_MESH_LISTEN, else where the others connect (TURNMILL_MESH_CONNECT), else on loopback.
    """
    from workers.mesh_hub import run_hub

    settings = load_settings()
    if not settings.mesh_listen and not settings.mesh_config:
        settings = load_settings(mesh_listen=settings.mesh_connect or (HUB,), mesh_connect=())
    run_hub(settings)


@app.command()
def dev(
    procfile: Annotated[Path, typer.Option(help="The processes to run, one a line.")] = Path("Procfile"),
    model_server: Annotated[str, typer.Option(help="Module to run as the model's server, unless OPENAI_BASE_URL is set.")] = "",
) -> None:
    """Run everything on this machine, with a Redis server of its own unless TURNMILL_REDIS_URL is set, until Ctrl-C.

    What runs the user's modules starts again when a Python file beside them changes.
    """
    from workers.dev import run

    raise SystemExit(run(procfile, model_server=model_server))


@app.command()
def version() -> None:
    """Print the version."""
    print(f"turnmill {importlib.metadata.version('turnmill')}")


@keys.command("create")
def create_api_key(
    sub: Annotated[str, typer.Option(help="Whom the key stands for.")],
    tenant: Annotated[str, typer.Option(help="The tenant whose data it reaches.")],
    scope: Annotated[list[str], typer.Option(help="What it may do; may be given several times.")],
    role: Annotated[list[str] | None, typer.Option(help="A role for gates that name one; may be given several times.")] = None,
) -> None:
    """Make a key and print it, once: only its hash is kept."""
    from orchestration.state.api_keys import create_key
    from orchestration.state.store import translated

    with translated():
        key, made = create_key(_client(load_settings()), sub, tenant, scope, role or ())
    print(f"{made.key_id} for {sub} of {tenant}. This is the key; it is not kept and cannot be shown again:", file=sys.stderr)
    print(key)


@keys.command("list")
def list_api_keys() -> None:
    """Show what each key may do; the keys themselves are not kept."""
    from orchestration.state.api_keys import list_keys
    from orchestration.state.store import translated

    with translated():
        known = list_keys(_client(load_settings()))
    rows = [("ID", "SUB", "TENANT", "CREATED", "ROLES", "SCOPES")]
    for key in known:
        who = key.principal
        rows.append((key.key_id, who.sub, who.tenant, key.created_at, ",".join(who.roles) or "-", ",".join(who.scopes)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:  # plain lines, never cut to a terminal's width: the ids are there to be copied
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


@keys.command("revoke")
def revoke_api_key(key_id: Annotated[str, typer.Argument(help="Its id, from `turnmill keys list`.")]) -> None:
    """Make a key void at once."""
    from orchestration.state.api_keys import revoke_key
    from orchestration.state.store import translated

    with translated():
        if not revoke_key(_client(load_settings()), key_id):
            raise Invalid(f"there is no key {key_id!r}")
    print(f"{key_id} is void")


@callbacks.command("secret")
def callback_secret(tenant: Annotated[str, typer.Argument(help="Whose turns' callbacks it signs.")]) -> None:
    """Print the secret that a receiver of a tenant's callbacks checks them with; it is made at the first use."""
    from orchestration.core.ids import is_id
    from orchestration.outbound.signing import secrets_of
    from orchestration.state.secrets import Secrets
    from orchestration.state.store import Store

    if not is_id(tenant):
        raise Invalid(f"{tenant!r} is no tenant")
    settings = load_settings()
    for secret in secrets_of(tenant, settings, Secrets(Store(settings))):
        print(secret)


def _client(settings: Settings) -> Client:
    from orchestration.state.store import Store

    return Store(settings).client
