"""Telling the outside: where a callback_url may lead, signatures, retries, and hooks that raise or hang."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from standardwebhooks import Webhook as Verifier

from orchestration import Agent, AgentTool, BearerWebhooks, Gate, Webhook, WebhookAnswer
from orchestration.core.errors import Invalid, Misconfigured, StoreUnavailable
from orchestration.core.outbound import GIVE_UP_S, PAUSES_S, Delivery, OutboundEvent, Way, pause_s
from orchestration.core.principal import DEVELOPER
from orchestration.outbound import deliver as delivering
from orchestration.outbound import functions
from orchestration.outbound.address import AddressRefused, check_url, parse_networks, resolve
from orchestration.outbound.deliver import deliver
from orchestration.outbound.events import callback_body
from orchestration.outbound.signing import secrets_of, signed_headers
from orchestration.outbound.told import Told
from orchestration.settings import load_settings
from orchestration.state.leases import ProcessLease
from orchestration.testing.local import LocalTurnmill
from tests.fixtures.approvals import REFUND, Script, calls, due_entries, local, make_due, refund, says, sweep

INSIDE = [
    "http://127.0.0.1:6379/",
    "http://169.254.169.254/",
    "http://[::1]/",
    "http://10.0.0.5/",
    "http://192.168.1.1/",
    "http://172.16.0.1/",
    "http://100.64.0.1/",
    "http://0.0.0.0/",
    "http://224.0.0.1/",
    "http://255.255.255.255/",
    "http://2130706433/",
    "http://0x7f000001/",
    "http://127.1/",
    "http://0177.0.0.1/",
    "http://[::ffff:127.0.0.1]/",
    "http://[::127.0.0.1]/",
    "http://[64:ff9b::7f00:1]/",
    "http://[2002:7f00:1::]/",
    "http://[fe80::1%25eth0]/",
    "http://[fd00::1]/",
    "http://[fec0::1]/",
    "http://[64:ff9b:1::7f00:1]/",
    "http://[::ffff:0:127.0.0.1]/",
    "http://[2001:0:7f00:1::]/",
    "http://192.88.99.1/",
    "http://169.254.169.254./",
    "http://localhost/",
    "http://x.localhost/",
    "http://metadata.google.internal/",
]

NO_URLS = [
    "ftp://x/",
    "http://u:p@example.com/",
    "http://u@example.com/",
    "http:///path",
    "http://127%2e0%2e0%2e1/",
    "http://%31%32%37.0.0.1/",
    "http://[v1.x]/",
    "http://[127.0.0.1]/",
    "http://",
    "example.com",
    "",
    "http://example.com:99999/",
    "http://example.com:0/",
    "javascript:alert(1)",
    "http://exa mple.com/",
    "http://example.com/\r\nX: y",
    "http://example.com\\@127.0.0.1/",
    "http://" + "x" * 3000 + ".com/",
    "file:///etc/passwd",
]


@pytest.mark.parametrize("url", INSIDE + NO_URLS)
def test_a_callback_into_the_inside_or_to_no_url_is_refused_with_a_reason(url: str) -> None:
    with pytest.raises(Invalid) as refused:
        check_url(url, ())
    assert refused.value.errors[0]["loc"] == ["callback_url"]


@pytest.mark.parametrize(
    "url", ["https://example.com/hook?x=1", "http://example.com:8080/", "https://93.184.216.34/", "https://[2606:2800::1]/"]
)
def test_a_callback_to_the_outside_is_taken(url: str) -> None:
    assert check_url(url, ()).url == url


def test_a_name_that_leads_inside_is_refused_when_it_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", 80)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 80)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)
    with pytest.raises(AddressRefused):
        resolve(check_url("http://rebind.example/", ()), ())
    assert resolve(check_url("http://rebind.example/", ()), ["10.0.0.0/8"]) == ["93.184.216.34", "10.0.0.1"]


def test_networks_that_the_settings_name_may_be_called() -> None:
    assert check_url("http://10.1.2.3/", ["10.1.0.0/16"]).host == "10.1.2.3"
    assert check_url("http://[::ffff:10.1.2.3]/", ["10.1.0.0/16"])
    for inside in ("http://10.2.0.1/", "http://127.0.0.1/"):
        with pytest.raises(Invalid):
            check_url(inside, ["10.1.0.0/16"])
    with pytest.raises(Misconfigured, match="CALLBACK_NETWORKS"):
        parse_networks(("10.1.0.0/99",))


def test_submitting_a_turn_with_a_callback_into_the_inside_stores_nothing() -> None:
    here = local(Script(says("hi")))
    with pytest.raises(Invalid):
        here.submit("support", "hi", callback_url="http://169.254.169.254/latest")
    assert not here.queue.waiting


@pytest.mark.parametrize("secret", ["whsec_%%%", "nope", "whsec_", "whsec_QUJD"])
def test_a_callback_secret_that_is_none_is_refused_at_start(secret: str) -> None:
    with pytest.raises(Misconfigured, match="CALLBACK_SECRET") as refused:
        load_settings(callback_secret=secret)
    assert secret not in str(refused.value).replace("whsec_ and", "")


def test_each_tenant_has_a_secret_of_its_own_unless_one_is_set() -> None:
    here = local(Script())
    [acme], [rival] = (secrets_of(tenant, here.settings, here.ports.secrets) for tenant in ("acme", "rival"))
    assert acme != rival and acme.startswith("whsec_") and len(base64.b64decode(acme[6:])) == 32
    assert secrets_of("acme", here.settings, here.ports.secrets) == [acme]
    two = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY= whsec_ZmVkY2JhOTg3NjU0MzIxMGZlZGNiYTk4NzY1NDMyMTA="
    assert secrets_of("acme", load_settings(callback_secret=two), here.ports.secrets) == two.split()


def test_a_receiver_can_check_who_called_with_any_of_the_secrets() -> None:
    import time

    secrets = ["whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=", "whsec_ZmVkY2JhOTg3NjU0MzIxMGZlZGNiYTk4NzY1NDMyMTA="]
    body = '{"type":"turn.ended","data":{"answer":"ü"}}'
    headers = signed_headers(secrets, "msg-1", body, now_s=int(time.time()))
    for secret in secrets:
        assert Verifier(secret).verify(body, headers) == json.loads(body)


def test_pauses_grow_until_a_day_is_over() -> None:
    now, attempt, pauses = 0.0, 1, []
    while (pause := pause_s(attempt, now)) is not None:
        pauses.append(pause)
        now, attempt = now + pause, attempt + 1
    assert pauses == sorted(pauses) and pauses[0] == PAUSES_S[0] and GIVE_UP_S * 0.8 < now <= GIVE_UP_S
    assert pause_s(1, 0, asked_for_s=600) == 600 and pause_s(1, GIVE_UP_S) is None


def test_a_delivery_has_one_name_that_tells_what_it_is() -> None:
    for way in Way:
        for event in OutboundEvent:
            delivery = Delivery(way, event, "tn_1_x-y", 3)
            assert Delivery.parse(delivery.name) == delivery and "." not in delivery.message_id
    for wrong in ("", "a.b.c", "callback.turn_ended.x.y", "callback.no_event.x.1", "callback.turn_ended.x.1.2"):
        with pytest.raises(ValueError):
            Delivery.parse(wrong)


URL = "https://hooks.example.com/turnmill"


def posted(monkeypatch: pytest.MonkeyPatch, *answers: Told) -> list[tuple[str, dict[str, str], dict[str, Any]]]:
    """Replaces the network: what was posted, and `answers` in turn (the last one again)."""
    sent: list[tuple[str, dict[str, str], dict[str, Any]]] = []
    left = list(answers) or [Told()]

    def post(place: Any, headers: Any, body: str, networks: Any) -> Told:
        sent.append((place.url, dict(headers), json.loads(body)))
        return left.pop(0) if len(left) > 1 else left[0]

    monkeypatch.setattr(delivering, "post", post)
    return sent


def tell_all(here: LocalTurnmill) -> list[str]:
    """What the leader and the queue would do: send what is due, make the attempts."""
    outcomes = []
    for entry in due_entries(here, "out"):
        here.ports.store.client.zadd("tm:due", {entry: 1})
    sweep(here)
    while here.queue.outbound:
        tenant, delivery, attempt = here.queue.outbound.popleft()
        outcomes.append(deliver(here.ports, tenant, delivery.name, attempt))
    return outcomes


def test_a_callback_hears_of_the_request_and_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = posted(monkeypatch)
    here = local(Script(calls(REFUND), says("done")), refund)
    turn = here.ask("support", "refund", callback_url=URL, metadata={"ticket": 7})
    assert tell_all(here) == ["done"]
    approval = here.approvals()[0]
    here.decide(approval["approval_id"], True)
    here.run()
    assert tell_all(here) == ["done"]
    (url, headers, requested), (_, _, ended) = sent
    assert url == URL and headers["webhook-id"] == f"callback-approval_requested-{approval['approval_id']}-1"
    assert requested["type"] == "approval.requested" and requested["data"]["approval_id"] == approval["approval_id"]
    assert requested["data"]["arguments"] == REFUND[1]
    assert ended["type"] == "turn.ended" and ended["data"]["turn_id"] == turn["turn_id"]
    assert (ended["data"]["answer"], ended["data"]["metadata"]) == ("done", {"ticket": 7})
    assert due_entries(here, "out") == {} and tell_all(here) == []


def test_a_callback_hears_of_a_reminder_and_of_a_request_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = posted(monkeypatch)
    gate = Gate(timeout_s=60, remind_before_s=20, on_expiry="escalate", escalate_to=["lead"])
    here = local(Script(calls(REFUND)), refund, approvals={"billing/refund": gate})
    here.ask("support", "refund", callback_url=URL)
    first = here.approvals()[0]["approval_id"]
    for kind in ("remind", "expire"):
        make_due(here, kind, first)
        sweep(here)
    tell_all(here)
    heard = {(body["type"], body["data"]["approval_id"]) for _, _, body in sent}
    second = here.approvals()[0]["approval_id"]
    assert heard == {("approval.requested", first), ("approval.reminder", first), ("approval.requested", second)} and len(sent) == 3


def test_a_callback_hears_of_what_an_agent_that_the_turn_asked_wants_and_of_one_end(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = posted(monkeypatch)
    boss = Agent("boss", Script(calls(("agent-clerk", {"input": "refund"})), says("ok")), tools=[AgentTool("clerk")])
    here = LocalTurnmill(boss, Agent("clerk", Script(calls(REFUND), says("refunded")), tools=[refund]))
    turn = here.ask("boss", "go", callback_url=URL)
    [approval] = here.approvals()
    tell_all(here)
    here.decide(approval["approval_id"], True)
    here.run()
    tell_all(here)
    told = [(body["type"], body["data"]["turn_id"]) for _, _, body in sent]
    assert told == [("approval.requested", approval["turn_id"]), ("turn.ended", turn["turn_id"])]


def test_a_callback_hears_of_a_turn_that_never_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = posted(monkeypatch)
    here = local(Script(says("first")))
    here.submit("support", "one", conversation_id="c")
    waiting = here.submit("support", "two", conversation_id="c", callback_url=URL)
    here.cancel(waiting.turn_id)
    assert tell_all(here) == ["done"] and sent[0][2]["data"]["stop_reason"] == "cancelled"


def test_a_turn_without_a_callback_makes_no_delivery() -> None:
    here = local(Script(calls(REFUND), says("done")), refund)
    here.ask("support", "refund")
    here.decide(here.approvals()[0]["approval_id"], True)
    here.run()
    assert due_entries(here, "out") == {} and not here.ports.store.client.keys("tm:dev:out:*")


def test_a_receiver_that_fails_is_tried_again_with_the_same_id(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = posted(monkeypatch, Told("status 503"), Told("unreachable (ConnectError)"), Told())
    here = local(Script(says("hi")))
    here.ask("support", "hi", callback_url=URL)
    assert tell_all(here) == ["again"]
    [at] = due_entries(here, "out").values()
    assert 4_000 < at - here.ports.approvals.now_ms() <= 5_000, "a due time, no message that waits"
    assert tell_all(here) == ["again"] and tell_all(here) == ["done"]
    assert len({headers["webhook-id"] for _, headers, _ in sent}) == 1 and len(sent) == 3
    assert due_entries(here, "out") == {}


def test_a_receiver_that_wants_no_more_gets_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = posted(monkeypatch, Told("status 410", for_good=True))
    here = local(Script(says("hi")))
    turn = here.ask("support", "hi", callback_url=URL)
    assert tell_all(here) == ["given_up"] and tell_all(here) == [] and len(sent) == 1
    view = here.ports.outbound.look("dev", Delivery(Way.CALLBACK, OutboundEvent.TURN_ENDED, turn["turn_id"]))
    assert view is not None and (view.state, view.code) == ("given_up", "status 410")


def test_after_a_day_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    posted(monkeypatch, Told("status 500"))
    here = local(Script(says("hi")))
    turn = here.ask("support", "hi", callback_url=URL)
    delivery = Delivery(Way.CALLBACK, OutboundEvent.TURN_ENDED, turn["turn_id"])
    here.ports.store.client.hset(f"tm:dev:out:{delivery.name}", "created", str(here.ports.approvals.now_ms() - GIVE_UP_S * 1000))
    assert tell_all(here) == ["given_up"] and due_entries(here, "out") == {}


def test_a_message_that_comes_twice_or_late_tells_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = posted(monkeypatch, Told("status 500"), Told())
    here = local(Script(says("hi")))
    turn = here.ask("support", "hi", callback_url=URL)
    name = Delivery(Way.CALLBACK, OutboundEvent.TURN_ENDED, turn["turn_id"]).name
    sweep(here)
    assert deliver(here.ports, "dev", name, 1) == "again"
    assert deliver(here.ports, "dev", name, 1) == deliver(here.ports, "dev", name, 2) == "not_due"
    here.queue.outbound.clear()
    assert tell_all(here) == ["done"]
    assert deliver(here.ports, "dev", name, 2) == "not_due" and len(sent) == 2


def test_a_lost_message_is_sent_again_and_a_dead_attempt_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = posted(monkeypatch)
    here = local(Script(says("hi")))
    turn = here.ask("support", "hi", callback_url=URL)
    delivery = Delivery(Way.CALLBACK, OutboundEvent.TURN_ENDED, turn["turn_id"])
    sweep(here)
    here.queue.outbound.clear()  # the broker lost it
    assert len(due_entries(here, "out")) == 1
    entry = next(iter(due_entries(here, "out")))
    here.ports.store.client.zadd("tm:due", {entry: 1})
    sweep(here)
    assert [attempt for _, _, attempt in here.queue.outbound] == [1], "it was not begun, so it is the same attempt"
    here.queue.outbound.clear()
    lost = ProcessLease(here.ports.store, here.ports.outbox)
    lost.register()
    dead = here.ports.outbound.begin("dev", delivery, 1, lost.process)
    assert dead is not None
    assert tell_all(here) == [] and len(due_entries(here, "out")) == 1, "whoever makes it lives, and has time"
    lost.give_back()
    assert tell_all(here) == ["done"] and len(sent) == 1
    here.ports.outbound.delivered(dead)
    view = here.ports.outbound.look("dev", delivery)
    assert view is not None and (view.state, view.attempt) == ("done", 2)


def test_a_redis_that_is_away_when_an_attempt_begins_or_ends_leaves_none_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = posted(monkeypatch)
    here = local(Script(says("hi")))
    turn = here.ask("support", "hi", callback_url=URL)
    delivery = Delivery(Way.CALLBACK, OutboundEvent.TURN_ENDED, turn["turn_id"])
    run, away = here.ports.store.run, {"outbound_claim": 2, "outbound_end": 2}

    def faulty(script: str, *args: str | int) -> Any:
        if away.get(script):
            away[script] -= 1
            if away[script]:
                run(script, *args)  # it ran, and its answer got lost
            raise StoreUnavailable("the store does not answer")
        return run(script, *args)

    monkeypatch.setattr(here.ports.store, "run", faulty)
    assert tell_all(here) == ["done"] and len(sent) == 1
    view = here.ports.outbound.look("dev", delivery)
    assert view is not None and (view.state, view.attempt) == ("done", 1) and away == {"outbound_claim": 0, "outbound_end": 0}
    assert due_entries(here, "out") == {}


def test_a_message_in_a_long_queue_is_not_doubled_and_counts_as_lost_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    posted(monkeypatch)
    here = local(Script(says("hi")))
    turn = here.ask("support", "hi", callback_url=URL)
    name = Delivery(Way.CALLBACK, OutboundEvent.TURN_ENDED, turn["turn_id"]).name
    sweep(here)
    here.queue.outbound.clear()
    monkeypatch.setattr(here.queue, "is_empty", lambda kind: False)
    for waited, sent in ((False, 0), (True, 1)):
        if waited:
            here.ports.store.client.hset(f"tm:dev:out:{name}", "sent_at", "1")
        here.ports.store.client.zadd("tm:due", {next(iter(due_entries(here, "out"))): 1})
        sweep(here)
        assert len(here.queue.outbound) == sent
        assert len(due_entries(here, "out")) == 1, "it is looked for again"


def test_an_attempt_that_takes_too_long_is_made_again_although_its_process_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = posted(monkeypatch)
    here = local(Script(says("hi")))
    turn = here.ask("support", "hi", callback_url=URL)
    delivery = Delivery(Way.CALLBACK, OutboundEvent.TURN_ENDED, turn["turn_id"])
    sweep(here)
    here.queue.outbound.clear()
    assert here.ports.outbound.begin("dev", delivery, 1, here.ports.lease.process) is not None
    assert tell_all(here) == []
    here.ports.store.client.hset(f"tm:dev:out:{delivery.name}", "until", "1")
    assert tell_all(here) == ["done"] and len(sent) == 1


def test_a_process_makes_few_attempts_at_a_time_and_puts_the_others_off(monkeypatch: pytest.MonkeyPatch) -> None:
    posted(monkeypatch)
    monkeypatch.setattr(delivering, "_room", threading.Semaphore(0))
    here = local(Script(says("hi")))
    here.ask("support", "hi", callback_url=URL)
    assert tell_all(here) == ["put_off"] and len(due_entries(here, "out")) == 1
    monkeypatch.setattr(delivering, "_room", threading.Semaphore(1))
    assert tell_all(here) == ["done"]


def test_a_callback_that_may_not_be_called_any_more_is_given_up_without_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = posted(monkeypatch)
    here = local(Script(says("hi")), settings={"callback_networks": "10.0.0.0/8"})
    here.ask("support", "hi", callback_url="http://10.0.0.5/")
    object.__setattr__(here.ports, "settings", load_settings())
    assert tell_all(here) == ["given_up"] and sent == []


def test_a_hook_gets_each_request_once() -> None:
    heard: list[dict[str, Any]] = []
    here = local(Script(calls(REFUND), says("done")), refund, hook=heard.append)
    here.ask("support", "refund")
    assert tell_all(here) == ["done"] and tell_all(here) == []
    assert [one["approval_id"] for one in heard] == [here.approvals()[0]["approval_id"]]
    assert heard[0]["arguments"] == REFUND[1] and heard[0]["state"] == "pending"


def test_an_async_hook_is_awaited() -> None:
    heard: list[str] = []

    async def hook(approval: dict[str, Any]) -> None:
        heard.append(approval["tool"])

    here = local(Script(calls(REFUND), says("done")), refund, hook=hook)
    here.ask("support", "refund")
    assert tell_all(here) == ["done"] and heard == ["billing-refund"]


def raising(approval: dict[str, Any]) -> None:
    raise ValueError(f"canary {approval['arguments']}")


def leaving(approval: dict[str, Any]) -> None:
    raise SystemExit(3)


@pytest.mark.parametrize("hook", [raising, leaving])
def test_a_broken_hook_strands_no_request_and_logs_no_arguments(hook: Callable[[Any], object], caplog: pytest.LogCaptureFixture) -> None:
    here = local(Script(calls(REFUND), says("done")), refund, hook=hook)
    turn = here.ask("support", "refund")
    assert tell_all(here) == ["again"] and tell_all(here) == ["again"]
    here.decide(here.approvals()[0]["approval_id"], True)
    here.run()
    assert here.turn(turn["turn_id"])["state"] == "completed"
    assert "canary" not in caplog.text and "o-42" not in caplog.text


def test_a_hook_that_hangs_is_left_and_at_most_a_few_of_them() -> None:
    let_go = threading.Event()
    try:
        for _ in range(functions.MAX_HANGING):
            assert functions.call(lambda _: let_go.wait(60), None, limit_s=0.01).code == "timeout"
        assert functions.call(lambda _: None, None).code == "busy"
    finally:
        let_go.set()
    while functions.call(lambda _: None, None).code == "busy":
        pass


def test_a_reopened_request_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestration.actions.reopen import reopen
    from tests.fixtures.approvals import make_due

    sent, heard = posted(monkeypatch), []
    here = local(
        Script(calls(REFUND), says("done")), refund, hook=heard.append, approvals={"billing/refund": Gate(timeout_s=60, on_expiry="hold")}
    )
    here.ask("support", "refund", callback_url=URL)
    id_ = here.approvals()[0]["approval_id"]
    assert sorted(tell_all(here)) == ["done", "done"]
    make_due(here, "expire", id_)
    sweep(here)
    reopen(here.ports, here.principal, id_)
    assert sorted(tell_all(here)) == ["done", "done"]
    assert len(heard) == 2 and len({headers["webhook-id"] for _, headers, _ in sent}) == 2


def test_a_webhooks_on_answer_hears_how_its_turn_ended() -> None:
    heard: list[WebhookAnswer] = []
    hook = Webhook(
        "shop",
        agent="support",
        scheme=BearerWebhooks(secret_env="X"),
        principal="shop",
        tenant="dev",
        to_turn=lambda request: None,
        on_answer=heard.append,
    )
    here = LocalTurnmill(Agent("support", Script(says("the answer"))), hook)
    turn = here.ask("support", "hi", webhook="shop", metadata={"channel": "C1"}, principal=DEVELOPER)
    assert tell_all(here) == ["done"]
    [answer] = heard
    assert (answer.answer, answer.turn_id, answer.metadata) == ("the answer", turn["turn_id"], {"channel": "C1"})
    assert answer.delivery_id == Delivery(Way.ANSWER, OutboundEvent.TURN_ENDED, turn["turn_id"]).message_id


def test_what_is_told_of_is_read_when_it_is_told_and_gone_is_given_up() -> None:
    here = local(Script(says("hi")))
    turn = here.ask("support", "hi", callback_url=URL)
    delivery = Delivery(Way.CALLBACK, OutboundEvent.TURN_ENDED, turn["turn_id"])
    url, body = callback_body(here.ports, "dev", delivery)
    assert url == URL and json.loads(body)["data"]["state"] == "completed" and "calls" not in json.loads(body)["data"]
    here.ports.store.client.delete(f"tm:dev:turn:{turn['turn_id']}")
    assert tell_all(here) == ["given_up"]
