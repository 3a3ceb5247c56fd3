"""The tasks: a few lines each around a step. Their messages, arguments and results are ids; what happens is in the journal.

They are shared tasks, so that another Celery project can import this module and run turns with its own app.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from celery import shared_task
from celery.exceptions import Ignore

from orchestration.core.ids import StepKind
from orchestration.core.outbound import Way
from orchestration.outbound.deliver import deliver
from orchestration.queue import names
from orchestration.steps.decide import decide as decide_step
from orchestration.steps.observe import observe as observe_step
from orchestration.steps.plan import plan as plan_step
from orchestration.steps.tool import PARKED
from orchestration.steps.tool import tool as tool_step
from workers import lifecycle
from workers.runtime import runtime

Function = TypeVar("Function", bound=Callable[..., None])

OPTIONS: dict[str, Any] = {
    "bind": True,
    "acks_late": True,
    "ignore_result": True,
    "serializer": "json",
    "max_retries": 0,
    "track_started": False,
}

lifecycle.connect()


def task(name: str) -> Callable[[Function], Function]:
    """A shared task of this name, with the options that matter for correctness."""
    return cast(Callable[[Function], Function], shared_task(name=name, **OPTIONS))


@task(names.PLAN)
def plan(self: Any, tenant: str, turn_id: str, round_: int) -> None:
    """Ask the model for one round."""
    plan_step(names.step_of(StepKind.PLAN, tenant, turn_id, round_), runtime().ports)


@task(names.TOOL)
def tool(self: Any, tenant: str, turn_id: str, round_: int, index: int) -> None:
    """Ask the mesh for one call; one that waits for a human leaves its chord open and holds nothing."""
    outcome = tool_step(names.step_of(StepKind.TOOL, tenant, turn_id, round_, index), runtime().ports)
    if outcome == PARKED:
        self.send_event(names.WAITING_EVENT)
    if outcome in (PARKED, "ended", "unknown"):  # of an ended turn nothing counts any more: its chord's keys are gone
        raise Ignore


@task(names.OBSERVE)
def observe(self: Any, tenant: str, turn_id: str, round_: int) -> None:
    """Feed a round's results back and plan the next."""
    observe_step(names.step_of(StepKind.OBSERVE, tenant, turn_id, round_), runtime().ports)


@task(names.DECIDE)
def decide(self: Any, tenant: str, turn_id: str, round_: int, index: int) -> None:
    """Carry out a recorded decision: send the suspended step again, with the id and the chord that it had."""
    decide_step(names.step_of(StepKind.DECIDE, tenant, turn_id, round_, index), runtime().ports)


@task(names.OUTBOUND[Way.CALLBACK])
def callback(self: Any, tenant: str, delivery: str, attempt: int) -> None:
    """Make one attempt to call a turn's `callback_url`."""
    deliver(runtime().ports, tenant, delivery, attempt)


@task(names.OUTBOUND[Way.HOOK])
def hook(self: Any, tenant: str, delivery: str, attempt: int) -> None:
    """Make one attempt to call the user's `on_approval_request`."""
    deliver(runtime().ports, tenant, delivery, attempt)


@task(names.OUTBOUND[Way.ROUND])
def last_round(self: Any, tenant: str, delivery: str, attempt: int) -> None:
    """Make one attempt to call an agent's `on_round` with its whole turn."""
    deliver(runtime().ports, tenant, delivery, attempt)


@task(names.OUTBOUND[Way.ANSWER])
def answer(self: Any, tenant: str, delivery: str, attempt: int) -> None:
    """Make one attempt to call the `on_answer` of the webhook that a turn came from."""
    deliver(runtime().ports, tenant, delivery, attempt)
