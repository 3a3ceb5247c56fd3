"""The hub of the mesh for development and small deployments: a Zenoh router in a process of ours, which serves nothing itself."""

from __future__ import annotations

from orchestration.core.errors import Misconfigured
from orchestration.mesh.session import MeshSession
from orchestration.settings import Settings
from workers.stopping import StopSignal


def run_hub(settings: Settings) -> None:
    """Listen on `settings.mesh_listen` and pass on between all that connect, until SIGTERM or SIGINT.

    Raises:
        Misconfigured: there is nothing to listen on, or an address is taken.
    """
    if not settings.mesh_listen and not settings.mesh_config:
        raise Misconfigured("the hub needs TURNMILL_MESH_LISTEN, for example tcp/127.0.0.1:7447")
    stop = StopSignal()
    session = MeshSession(settings, mode="router")
    session.start()
    print(f"mesh hub listening on {', '.join(settings.mesh_listen) or settings.mesh_config}", flush=True)
    try:
        stop.wait()
    finally:
        session.close()
