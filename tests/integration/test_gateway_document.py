"""The OpenAPI document, tried against the served gateway: whatever it allows is answered as it says, and never with a fault of ours.

Cases are made by schemathesis from a fixed seed, so that a run can be repeated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from gateway_stage import Served, emptied, served_gateway
from schemathesis import GenerationMode

from gateway.app import create_app
from orchestration import Agent, MeshTool, StandardWebhooks, Webhook
from orchestration.models.scripted import FunctionModel
from orchestration.project import Project
from orchestration.settings import Settings
from orchestration.testing.servers import RedisServer

KEY = "key-of-a-careful-one"
SCOPES = ["turns:write", "turns:read", "approvals:read", "approvals:decide", "admin"]

#: Few cases of each operation: the gateway is real, and the suite's time is everybody's.
FEW = hypothesis.settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)


@pytest.fixture(scope="module")
def gateway(turnmill_redis: RedisServer) -> Iterator[Served]:
    agent = Agent("support", FunctionModel(lambda messages: "fine"), tools=[MeshTool("billing/refund", approval="money moves")])
    hook = Webhook("shop", "support", StandardWebhooks("SHOP_SECRET"), "bot", "acme", lambda request: {"input": "x"})
    keys = json.dumps([{"key": KEY, "sub": "ann", "tenant": "acme", "scopes": SCOPES, "roles": ["ops"]}])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOP_SECRET", "whsec_" + "AAAA" * 8)
        with served_gateway(
            emptied(turnmill_redis), Project({"support": agent}, {"shop": hook}), working=True, api_keys=keys, rate_per_s=0
        ) as served:
            served.client.headers["Authorization"] = f"Bearer {KEY}"
            yield served


#: How what does not fit may be refused: as schemathesis has it, and as too large, which it knows nothing of.
REFUSALS = ["400", "401", "403", "404", "405", "406", "409", "413", "415", "422", "428", "429", "431", "5xx"]

CHECKS = {"checks": {check: {"expected-statuses": REFUSALS} for check in ("negative_data_rejection", "missing_required_header")}}

DOCUMENT = schemathesis.openapi.from_dict(create_app(Settings()).openapi(), config=schemathesis.Config.from_dict(CHECKS))
OPERATIONS = [found.ok() for found in DOCUMENT.get_all_operations()]


#: Operations to which nothing can be sent that does not fit: they take nothing, or any text.
UNFAILING = {
    "GET /healthz",
    "GET /readyz",
    "GET /metrics",
    "GET /v1/models",
    "GET /v1/agents",
    "POST /v1/tickets",
    "POST /v1/webhooks/{name}",
}

TRIED = [(operation, mode) for operation in OPERATIONS for mode in GenerationMode if mode.is_positive or operation.label not in UNFAILING]


@pytest.mark.parametrize(("operation", "mode"), TRIED, ids=[f"{operation.label}-{mode.value}" for operation, mode in TRIED])
def test_whatever_is_sent_is_answered_as_the_document_says(gateway: Served, operation: Any, mode: GenerationMode) -> None:
    @FEW
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def tried(case: Any) -> None:
        answer = case.call(base_url=gateway.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
        case.validate_response(answer)

    tried()


def test_every_route_and_every_answer_is_described(gateway: Served) -> None:
    paths = gateway.client.get("/openapi.json").json()["paths"]
    assert {
        "/v1/agents",
        "/v1/agents/{agent}/turns",
        "/v1/agents/{name}",
        "/v1/approvals",
        "/v1/approvals/{approval_id}/decision",
        "/v1/chat/completions",
        "/v1/conversations/{conversation_id}",
        "/v1/conversations/{conversation_id}/frames",
        "/v1/conversations/{conversation_id}/history",
        "/v1/models",
        "/v1/tickets",
        "/v1/turns/{turn_id}",
        "/v1/turns/{turn_id}/calls/{call_id}/cancel",
        "/v1/turns/{turn_id}/cancel",
        "/v1/turns/{turn_id}/frames",
        "/v1/webhooks/{name}",
        "/healthz",
        "/metrics",
        "/readyz",
    } <= set(paths)
    for path, operations in paths.items():
        for method, operation in operations.items():
            assert operation["summary"], (method, path)
            assert {"400", "401", "500", "503"} <= set(operation["responses"]), (method, path)


def test_the_document_holds_no_secret_and_no_place_of_this_machine(gateway: Served) -> None:
    text = gateway.client.get("/openapi.json").text
    for word in (KEY, "whsec_", "tmk_", "Bearer ey", str(Path.cwd()), str(Path.home()), "127.0.0.1"):
        assert word not in text
