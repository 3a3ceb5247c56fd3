"""What the outside is told, read off the journal when it is told: the body of a call, and what a function of the user's gets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from orchestration.actions.read import turn_as_api
from orchestration.core.agent import Agent
from orchestration.core.approval import as_api
from orchestration.core.checkpoint import Checkpoint, checkpoint
from orchestration.core.compaction import View
from orchestration.core.errors import NotFound
from orchestration.core.limits import Spent
from orchestration.core.outbound import Delivery, OutboundEvent
from orchestration.core.safe_json import dumps
from orchestration.core.times import rfc3339
from orchestration.core.turn import TurnRequest
from orchestration.core.webhook import WebhookAnswer
from orchestration.state.conversations import TurnView
from orchestration.wiring import Ports

#: What a receiver is not sent of a turn: it is long, and can be read.
_LEFT_OUT = ("calls",)


def callback_body(ports: Ports, tenant: str, delivery: Delivery) -> tuple[str, str]:
    """Where a call goes, and its body.

    Raises:
        NotFound: what it tells of is no longer kept.
    """
    if delivery.event is OutboundEvent.TURN_ENDED:
        view = ports.conversations.turn(tenant, delivery.subject)
        data = {name: value for name, value in turn_as_api(view).items() if name not in _LEFT_OUT}
        return view.request.callback_url, _body(delivery, view.number("ended"), data)
    approval = ports.approvals.get(tenant, delivery.subject)
    request = ports.conversations.fields(tenant, approval.turn_id, "req")[0]
    if request is None:
        raise NotFound("there is no such turn")
    url = TurnRequest.from_json(json.loads(request)).callback_url
    return url, _body(delivery, approval.requested_at, as_api(approval))


def _body(delivery: Delivery, at_ms: int, data: Mapping[str, Any]) -> str:
    return dumps({"type": str(delivery.event), "timestamp": rfc3339(at_ms), "data": data})


def ended_checkpoint(ports: Ports, view: TurnView, agent: Agent) -> Checkpoint:
    """The conversation as a turn left it, for the `on_round` of the agent that ended it."""
    request = view.request
    tenant, conversation_id = request.tenant, request.conversation_id
    kept = ports.conversations.conversation(tenant, conversation_id)
    entries = [entry for _, entry in ports.conversations.log(tenant, conversation_id, limit=int(kept["length"]))]
    while entries and entries[-1]["turn_id"] != request.turn_id:
        entries.pop()  # of a turn that came later
    return checkpoint(
        entries,
        conversation_id=conversation_id,
        turn_id=request.turn_id,
        agent=agent.name,
        system=agent.system_for(request.brief),
        round_=view.rounds,
        view=View.from_json(kept.get("compacted") or ""),
        spent=Spent(input_tokens=int(kept.get("in") or 0), output_tokens=int(kept.get("out") or 0)),
        stop_reason=view.raw.get("stop", ""),
    )


def webhook_answer(view: TurnView, delivery: Delivery) -> WebhookAnswer:
    """How a webhook's turn ended, for its `on_answer`."""
    raw, request = view.raw, view.request
    return WebhookAnswer(
        webhook=request.webhook,
        turn_id=request.turn_id,
        conversation_id=request.conversation_id,
        agent=request.agent,
        state=str(view.state),
        stop_reason=raw.get("stop", ""),
        answer=raw.get("answer", ""),
        output=json.loads(raw["output"]) if "output" in raw else None,
        error=json.loads(raw["error"]) if "error" in raw else None,
        metadata=request.metadata,
        delivery_id=delivery.message_id,
    )
