"""What the gateway keeps in Redis, on a Redis in this process: rates, tickets, and conversations that are not kept."""

from __future__ import annotations

from typing import Any

import fakeredis
import pytest
from pydantic import BaseModel

from orchestration.core.agent import Agent
from orchestration.core.conversation import input_entry, message_entry
from orchestration.core.errors import Misconfigured
from orchestration.core.webhook import BearerWebhooks, Webhook
from orchestration.models.scripted import ScriptedModel
from orchestration.settings import Settings
from orchestration.state.passing import KEPT_S, begin_passing
from orchestration.state.rates import Rates
from orchestration.state.store import Store
from orchestration.state.tickets import Tickets
from orchestration.testing.local import LocalTurnmill


@pytest.fixture
def store() -> Store:
    server = fakeredis.FakeServer()
    return Store(Settings(), connect=lambda: fakeredis.FakeRedis(server=server, decode_responses=True))


def test_a_bucket_gives_what_it_holds_and_says_when_there_is_more(store: Store) -> None:
    rates = Rates(store, per_s=0.001, burst=3)
    found = [rates.take("acme", "ann") for _ in range(4)]
    assert [one and one.allowed for one in found] == [True, True, True, False]
    assert [one and one.remaining for one in found] == [2, 1, 0, 0]
    refused = found[-1]
    assert refused is not None and 999 < refused.retry_after_s <= 1000 and 2999 < refused.full_in_s <= 3000
    for tenant, sub in (("acme", "bob"), ("rival", "ann")):
        other = rates.take(tenant, sub)
        assert other is not None and other.allowed


def test_more_than_a_bucket_holds_is_never_given(store: Store) -> None:
    rates = Rates(store, per_s=10, burst=3)
    too_much = rates.take("acme", "ann", 4)
    assert too_much is not None and not too_much.allowed and too_much.remaining == 3


def test_other_bounds_are_another_bucket(store: Store) -> None:
    narrow, wide = Rates(store, per_s=0.001, burst=1), Rates(store, per_s=1, burst=10)
    narrow.take("acme", "ann")
    assert not narrow.take("acme", "ann").allowed  # type: ignore[union-attr]
    assert wide.take("acme", "ann").allowed  # type: ignore[union-attr]
    assert Rates(store, per_s=0, burst=1).take("acme", "ann") is None


def test_a_ticket_is_good_once(store: Store) -> None:
    tickets = Tickets(store)
    ticket, expires_at = tickets.issue('{"who": "ann"}')
    assert expires_at.endswith("Z")
    assert ticket not in str(store.client.keys("*")), "the ticket itself is kept"
    assert tickets.redeem(ticket) == '{"who": "ann"}'
    assert tickets.redeem(ticket) is None
    for text in ("", "tkt_", "tmk_" + "x" * 40, "tkt_" + "x" * 200, "tkt_\ud800"):
        assert tickets.redeem(text) is None


def test_a_conversation_that_is_not_kept_begins_with_what_was_brought_along() -> None:
    model = ScriptedModel(["fine"])
    local = LocalTurnmill(Agent("support", model))
    history = [input_entry("", "earlier"), message_entry("", 0, "I see")]
    submitted = local.submit("support", "and now?", history=history)
    local.run()
    assert local.turn(submitted.turn_id)["answer"] == "fine"
    assert [message["content"] for message in model.requests[-1].messages] == ["earlier", "I see", "and now?"]
    client = local.ports.store.client
    key = f"tm:dev:conv:{submitted.conversation_id}"
    for name in (key, f"{key}:log", f"{key}:frames", f"tm:dev:turn:{submitted.turn_id}"):
        assert 0 < int(client.ttl(name)) <= KEPT_S, name


def test_beginning_such_a_conversation_twice_changes_nothing(store: Store) -> None:
    for _ in range(2):
        begin_passing(store, "acme", "cv_1", [input_entry("", "hi")])
    assert store.client.llen("tm:acme:conv:cv_1:log") == 1
    assert store.client.ttl("tm:acme:conv:cv_1:log") > 0, "it must go when no turn follows"


def test_a_conversation_that_is_kept_is_kept_as_before() -> None:
    local = LocalTurnmill(Agent("support", ScriptedModel(["fine"])))
    submitted = local.submit("support", "hi")
    local.run()
    assert int(local.ports.store.client.ttl(f"tm:dev:conv:{submitted.conversation_id}")) > 86_400


# Declarations


class Preferences(BaseModel):
    locale: str


def test_parameters_of_an_agent_are_a_class_of_pydantics() -> None:
    Agent("guide", ScriptedModel([]), parameters=Preferences)
    for wrong in (dict, Preferences(locale="de"), {"locale": str}):
        with pytest.raises(Misconfigured, match="parameters"):
            Agent("guide", ScriptedModel([]), parameters=wrong)  # type: ignore[arg-type]


async def later(_: Any) -> None:
    """A function that a sender would wait for in vain."""


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "no id"},
        {"agent": ""},
        {"tenant": "a/b"},
        {"principal": ""},
        {"scheme": "github"},
        {"to_turn": later},
        {"to_turn": None},
        {"on_answer": "send"},
    ],
)
def test_a_webhook_that_cannot_work_is_refused_when_it_is_declared(wrong: dict[str, Any]) -> None:
    good: dict[str, Any] = {
        "name": "hook",
        "agent": "support",
        "scheme": BearerWebhooks("S"),
        "principal": "bot",
        "tenant": "acme",
        "to_turn": lambda request: None,
    }
    Webhook(**good, on_answer=later)
    with pytest.raises(Misconfigured, match="Webhook"):
        Webhook(**{**good, **wrong})
