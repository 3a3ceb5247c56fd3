"""Routes for those who run the gateway: whether it lives, and whether what it needs answers."""

from __future__ import annotations

import logging
from collections.abc import Callable

from fastapi import APIRouter, Response
from starlette.concurrency import run_in_threadpool

from gateway.bodies import json_answer
from gateway.parts import GatewayParts
from gateway.shapes import Health
from orchestration.core.errors import MeshUnavailable
from orchestration.core.ids import StepKind
from orchestration.mesh.adapter import ZenohMesh
from orchestration.state.checks import check_store
from orchestration.wiring import Ports

log = logging.getLogger(__name__)

#: Seconds that the mesh may take to be there.
MESH_S = 2.0

router = APIRouter(tags=["running"])


@router.get("/healthz", summary="Alive", response_model=Health)
async def healthz() -> Response:
    """200 while the process can answer at all; asks nobody else."""
    return json_answer({"status": "ok"})


@router.get(
    "/readyz", summary="Ready", response_model=Health, responses={503: {"description": "something does not answer", "model": Health}}
)
async def readyz(parts: GatewayParts) -> Response:
    """200 when state, broker and mesh answer, else 503; says which does not."""
    checks = await run_in_threadpool(_checks, parts.ports)
    ready = all(found == "ok" for found in checks.values())
    return json_answer({"status": "ready" if ready else "not_ready", "checks": checks}, 200 if ready else 503)


def _checks(ports: Ports) -> dict[str, str]:
    return {
        "state": _outcome(lambda: _reach_state(ports)),
        "broker": _outcome(lambda: ports.queue.is_empty(StepKind.PLAN)),
        "mesh": _outcome(lambda: _reach_mesh(ports)),
    }


def _reach_state(ports: Ports) -> None:
    ports.store.client.ping()
    check_store(ports.store, warn=False)


def _reach_mesh(ports: Ports) -> None:
    if isinstance(ports.mesh, ZenohMesh):
        ports.mesh.session.opened(MESH_S)
        if not ports.mesh.session.connected:
            raise MeshUnavailable("no link to the mesh")


def _outcome(check: Callable[[], object]) -> str:
    """`ok`, or the kind of what went wrong: its message may name addresses, which are nobody else's business."""
    try:
        check()
    except Exception as error:
        log.warning("not ready: %s", type(error).__name__)
        return type(error).__name__
    return "ok"
