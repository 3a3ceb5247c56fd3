"""A real Istos node lists and decides our approvals, whichever of our processes answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import zenoh
from istos.agent.approval import decide_approval, list_approvals
from istos.errors import IstosError, NotFoundError

from orchestration import Agent, Gate
from orchestration.mesh.adapter import ZenohMesh
from orchestration.mesh.session import MeshSession
from orchestration.state.api_keys import create_key
from orchestration.testing.servers import RedisServer
from tests.fixtures.approvals import OnRedis, Refunds, ran, refund
from tests.integration.mesh_stage import Hub, end_processes, istos_node, settings_for, until
from workers.approval_keys import ApprovalsOnMesh, only_on_this_machine


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    made = Hub()
    yield made
    end_processes()


@pytest.fixture(scope="module")
def node(hub: Hub) -> Iterator[Callable[..., Any]]:
    with istos_node(hub.endpoint, "operators") as run:
        yield run


@dataclass
class Deployment:
    """Two processes' worth of ours, and keys for people."""

    here: OnRedis
    members: list[ApprovalsOnMesh]
    meshes: list[ZenohMesh]
    keys: dict[str, str]

    @property
    def serving(self) -> list[ApprovalsOnMesh]:
        return [member for member in self.members if member.keys.serving]

    def ask(self) -> str:
        """Have a human asked; the approval's id."""
        turn = self.here.ask("support", "refund")
        assert turn["state"] == "waiting"
        return str(turn["calls"][0]["approval_id"])


@pytest.fixture
def deployment(hub: Hub, turnmill_redis: RedisServer) -> Iterator[Deployment]:
    ran.clear()
    here = OnRedis(turnmill_redis.url, Agent("support", Refunds(), tools=[refund], approvals={"billing/refund": Gate(roles=["ops"])}))
    here.ports.store.client.flushdb()
    here.ports.lease.register(instead_of=here.ports.lease.process)
    keys = {}
    people = {
        "ann": ("dev", ["ops"], ["approvals:read", "approvals:decide"]),
        "bob": ("dev", ["sales"], ["approvals:read", "approvals:decide"]),
    }
    people |= {"eve": ("rival", ["ops"], ["approvals:read", "approvals:decide"]), "decider": ("dev", ["ops"], ["approvals:decide"])}
    for sub, (tenant, roles, scopes) in people.items():
        keys[sub] = create_key(here.ports.store.client, sub, tenant, scopes, roles)[0]
    settings = settings_for(hub.endpoint, redis_url=turnmill_redis.url, service="My Svc")
    object.__setattr__(here.ports, "settings", settings)
    meshes = [ZenohMesh(settings) for _ in range(2)]
    members = [ApprovalsOnMesh(here.ports, mesh) for mesh in meshes]
    for member in members:
        member.start()
    made = Deployment(here, members, meshes, keys)
    until(lambda: made.serving)
    yield made
    for member in members:
        member.stop()
    for mesh in meshes:
        mesh.close()
    here.close()


def listed(node: Callable[..., Any], **more: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = node(lambda app: list_approvals(app, **more))
    return found


def asked(node: Callable[..., Any], deployment: Deployment) -> str:
    """A new request, once the node has found its way to whoever serves the keys."""
    id_ = deployment.ask()
    until(lambda: id_ in [one["id"] for one in listed(node, token=deployment.keys["ann"])])
    return id_


def test_an_istos_node_sees_each_request_once_although_two_of_ours_stand_by(node: Callable[..., Any], deployment: Deployment) -> None:
    ids = [asked(node, deployment) for _ in range(3)]
    found = until(lambda: listed(node, token=deployment.keys["ann"]))
    assert [one["id"] for one in found] == ids, "each once, oldest first"
    one = found[0]
    assert (one["service"], one["tool"], one["prefix"], one["state"]) == ("My Svc", "billing-refund", "billing/refund", "pending")
    assert one["arguments"] == {"order_id": "o-42", "amount": 40} and one["reason"] == "moves real money"
    assert one["requester"] == "support" and one["expires_at"] - one["requested_at"] == pytest.approx(86_400, abs=1)
    assert one["decided_by"] is None and one["decided_at"] == 0.0
    assert len(deployment.serving) == 1


def test_a_long_list_is_whole_and_a_very_long_one_shows_the_oldest(
    node: Callable[..., Any], deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.approval_keys.PAGE", 2)
    ids = [asked(node, deployment), *(deployment.ask() for _ in range(6))]
    assert [one["id"] for one in listed(node, token=deployment.keys["ann"])] == ids
    monkeypatch.setattr("orchestration.mesh.approvals.MAX_LISTED", 5)
    assert [one["id"] for one in listed(node, token=deployment.keys["ann"])] == ids[:5]
    monkeypatch.setattr("orchestration.mesh.approvals.MAX_LISTED_BYTES", 1000)
    shown = [one["id"] for one in listed(node, token=deployment.keys["ann"])]
    assert shown and shown == ids[: len(shown)] and len(shown) < 5


def test_an_istos_node_decides_as_whoever_its_token_stands_for(node: Callable[..., Any], deployment: Deployment) -> None:
    id_ = asked(node, deployment)
    settled = node(lambda app: decide_approval(app, id_, approved=True, by="somebody else", note="fine", token=deployment.keys["ann"]))
    assert (settled["state"], settled["decided_by"], settled["note"]) == ("approved", "ann", "fine")
    again = node(lambda app: decide_approval(app, id_, approved=False, token=deployment.keys["ann"]))
    assert again["state"] == "approved", "the first decision stands, and the loser reads it"
    deployment.here.run()
    assert ran == [("o-42", 40)]


def test_anything_but_an_explicit_yes_denies(node: Callable[..., Any], deployment: Deployment) -> None:
    for word, state in (("yes", "approved"), ("TRUE", "approved"), ("maybe", "denied"), ("", "denied")):
        id_ = asked(node, deployment)
        assert (
            node(lambda app, id_=id_, word=word: decide_approval(app, id_, approved=word, token=deployment.keys["ann"]))["state"] == state
        )


def test_without_a_token_or_with_anothers_nothing_is_listed_or_decided(node: Callable[..., Any], deployment: Deployment) -> None:
    id_ = asked(node, deployment)
    for more in ({}, {"token": "nobody's"}, {"token": deployment.keys["eve"]}, {"token": deployment.keys["decider"]}):
        assert listed(node, **more) == []
    for more in ({}, {"token": "nobody's"}, {"token": deployment.keys["eve"]}):
        with pytest.raises(NotFoundError):
            node(lambda app, more=more: decide_approval(app, id_, approved=True, **more))
    with pytest.raises(NotFoundError):
        node(lambda app: decide_approval(app, "ap_none", approved=True, token=deployment.keys["ann"]))
    with pytest.raises(IstosError) as refused:
        node(lambda app: decide_approval(app, id_, approved=True, token=deployment.keys["bob"]))
    assert refused.value.code == "forbidden"
    assert [one["id"] for one in listed(node, token=deployment.keys["ann"])] == [id_], "it still waits"


def test_edited_arguments_travel_over_the_mesh_and_pass_the_schema(hub: Hub, node: Callable[..., Any], deployment: Deployment) -> None:
    id_ = asked(node, deployment)
    for wrong in ("[1]", "{", json.dumps({"order_id": "o-42", "amount": "much"})):
        with pytest.raises(IstosError) as refused:
            node(
                lambda app, wrong=wrong: app.query_once(
                    ".istos/approvals/*/decide", request_id=id_, approved=True, arguments=wrong, token=deployment.keys["ann"]
                )
            )
        assert refused.value.code == "validation_error" and refused.value.details
    edited = json.dumps({"order_id": "o-42", "amount": 5})
    answer = node(
        lambda app: app.query_once(
            ".istos/approvals/*/decide", request_id=id_, approved=True, arguments=edited, token=deployment.keys["ann"]
        )
    )
    assert answer["matched"] and answer["request"]["arguments"]["amount"] == 5
    deployment.here.run()
    assert ran == [("o-42", 5)]


def test_another_process_takes_over_when_the_one_that_answers_dies(node: Callable[..., Any], deployment: Deployment) -> None:
    id_ = asked(node, deployment)
    [first] = deployment.serving
    other = next(member for member in deployment.members if member is not first)
    first._stopping.set()  # its thread ends without a word, as in a process that is killed
    first._thread.join()
    deployment.meshes[deployment.members.index(first)].session.close()
    until(lambda: other.keys.serving)
    assert [one["id"] for one in until(lambda: listed(node, token=deployment.keys["ann"]))] == [id_]
    assert node(lambda app: decide_approval(app, id_, approved=False, token=deployment.keys["ann"]))["state"] == "denied"


def test_a_process_that_slept_past_its_leadership_stays_silent(node: Callable[..., Any], deployment: Deployment) -> None:
    asked(node, deployment)
    [first] = deployment.serving
    other = next(member for member in deployment.members if member is not first)
    first._stopping.set()  # it does not renew, and its keys stay declared
    first._thread.join()
    until(lambda: other.keys.serving)
    until(lambda: time.monotonic() > first._until)
    assert first.keys.serving and other.keys.serving
    found = until(lambda: listed(node, token=deployment.keys["ann"]))
    assert len(found) == 1


def test_what_is_no_query_of_ours_breaks_nothing(hub: Hub, node: Callable[..., Any], deployment: Deployment) -> None:
    id_ = asked(node, deployment)
    peer = MeshSession(settings_for(hub.endpoint))
    try:
        session = peer.opened(20)
        for selector, attachment in (
            (".istos/approvals/*/decide", b"\xff\xfe"),
            (".istos/approvals/*/decide?approved=true", deployment.keys["ann"].encode()),
            (f".istos/approvals/*/decide?request_id={'x' * 5000};approved=true", deployment.keys["ann"].encode()),
            (".istos/approvals/*", b'{"tok": 5, "exp": "never"}'),
        ):
            replies = list(session.get(selector, attachment=attachment, consolidation=zenoh.ConsolidationMode.NONE, timeout=10))
            answers = [json.loads(reply.ok.payload.to_bytes()) for reply in replies if reply.ok is not None]
            assert answers and all(answer.get("matched") is False or answer.get("pending") == [] for answer in answers)
    finally:
        peer.close()
    assert [one["id"] for one in listed(node, token=deployment.keys["ann"])] == [id_]


@pytest.mark.parametrize(
    ("endpoints", "local"),
    [
        (("tcp/127.0.0.1:7447",), True),
        (("tcp/[::1]:7447", "unixsock-stream/tmp/x"), True),
        (("tcp/localhost:7447",), True),
        (("tcp/10.0.0.1:7447",), False),
        (("tcp/127.0.0.1:7447", "tls/mesh.example.com:7447"), False),
        (("tcp/0.0.0.0:7447",), False),
    ],
)
def test_serving_without_tokens_is_for_a_mesh_on_this_machine(endpoints: tuple[str, ...], local: bool) -> None:
    from orchestration.settings import Settings

    assert only_on_this_machine(Settings(mesh_connect=endpoints)) is local
    assert not only_on_this_machine(Settings(mesh_connect=endpoints, mesh_config="x.json5"))
