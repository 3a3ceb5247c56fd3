"""A caller's own token goes to tools where the agent says so: sealed while it is kept, gone with its turn, in no other name ever."""

from __future__ import annotations

import base64
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jwt
import pytest

from orchestration import Agent, AgentTool, Gate, MeshTool, tool
from orchestration.actions.submit import Submission
from orchestration.core.errors import Misconfigured, Unauthorized
from orchestration.core.principal import Principal
from orchestration.core.tool import ToolQuery
from orchestration.identity.callers import Caller
from orchestration.identity.sealing import TokenSeal
from orchestration.mesh.tokens import Asker, callers_of, verify
from orchestration.models import ScriptedModel
from orchestration.project import collect
from orchestration.settings import Settings, load_settings
from orchestration.testing.local import LocalTurnmill
from orchestration.wiring import make_ports

Turnmill = Callable[..., LocalTurnmill]

TOKEN = "ey.SECRET.token"
ANN = Principal("ann", "acme", scopes=("turns:write",))
LOOK = ("crm-look", {"who": "x"})


@tool("crm/look")
def look(who: str) -> str:
    """Look somebody up."""
    return f"found {who}"


@tool("crm/own")
def own(who: str) -> str:
    """Of the agents' own module."""
    return f"own {who}"


def key() -> str:
    return base64.b64encode(secrets.token_bytes(32)).decode()


def agent(script: list[Any], name: str = "desk", *, forward: bool = True, tools: tuple[Any, ...] = (), **more: Any) -> Agent:
    return Agent(
        name, ScriptedModel(script), tools=[MeshTool("crm/look", parameters=look.spec.parameters), *tools], forward_token=forward, **more
    )


def place(make: Turnmill, *declared: Any, **settings: Any) -> LocalTurnmill:
    here = make(*declared, principal=ANN, **settings)
    here.mesh.serve([look, own])
    return here


def ask(here: LocalTurnmill, name: str = "desk", *, for_s: float = 600, **more: Any) -> dict[str, Any]:
    turn = here.submit(name, "go", token=TOKEN, token_ends_s=time.time() + for_s, **more)
    here.run()
    return here.turn(turn.turn_id)


def sent(here: LocalTurnmill) -> list[str]:
    return [query.forwarded_token for query in here.mesh.asked]


def stored(here: LocalTurnmill) -> str:
    """All that is in Redis, as text."""
    client: Any = here.ports.store.client
    read: dict[str, Callable[[str], Any]] = {
        "hash": client.hgetall,
        "string": client.get,
        "list": lambda name: client.lrange(name, 0, -1),
        "set": client.smembers,
        "zset": lambda name: client.zrange(name, 0, -1),
        "stream": client.xrange,
    }
    return "\n".join(f"{name} {read[client.type(name)](name)}" for name in client.keys("*"))


def kept(here: LocalTurnmill) -> list[str]:
    return [str(name) for name in here.ports.store.client.keys("tm:acme:turn:*:token")]


def test_tools_get_the_callers_token_where_the_agent_forwards_it(turnmill: Turnmill) -> None:
    here = place(turnmill, agent([[LOOK], "done"]))
    assert ask(here)["answer"] == "done"
    assert sent(here) == [TOKEN]


def test_other_agents_forward_nothing_and_nothing_is_kept_for_them(turnmill: Turnmill) -> None:
    here = place(turnmill, agent([[LOOK], "done"], forward=False))
    here.submit("desk", "go", token=TOKEN, token_ends_s=time.time() + 600)
    assert kept(here) == []
    here.run()
    assert sent(here) == [""]


def test_a_caller_without_a_token_of_their_own_is_asked_for_by_turnmills(turnmill: Turnmill) -> None:
    here = place(turnmill, agent([[LOOK], "done"]))
    assert here.ask("desk", "go")["answer"] == "done", "with an API key there is nothing to forward"
    assert sent(here) == [""]


def test_tools_of_the_agents_own_module_know_turnmills_token_and_get_that(turnmill: Turnmill) -> None:
    here = place(turnmill, agent([[("crm-own", {"who": "x"}), LOOK], "done"], tools=(own,)))
    ask(here)
    assert {query.prefix: query.forwarded_token for query in here.mesh.asked} == {"crm/own": "", "crm/look": TOKEN}


def test_it_is_sealed_while_it_is_kept_and_gone_with_the_turn(turnmill: Turnmill) -> None:
    here = place(turnmill, agent([[LOOK], "done"]))
    turn = here.submit("desk", "go", token=TOKEN, token_ends_s=time.time() + 600, metadata={"in sight": "yes"})
    assert len(kept(here)) == 1 and "in sight" in stored(here)
    assert "SECRET" not in stored(here) and base64.b64encode(TOKEN.encode()).decode() not in stored(here)
    here.run()
    assert here.turn(turn.turn_id)["state"] == "completed" and sent(here) == [TOKEN]
    assert kept(here) == [] and "SECRET" not in stored(here)


@pytest.mark.parametrize("end", ["cancelled", "failed", "cancelled while it waited"])
def test_however_the_turn_ends(turnmill: Turnmill, end: str) -> None:
    here = place(turnmill, agent([RuntimeError("no"), RuntimeError("no")] if end == "failed" else ["one", "two"]))
    first = here.submit("desk", "go", conversation_id="c", token=TOKEN, token_ends_s=time.time() + 600)
    second = here.submit("desk", "go on", conversation_id="c", token=TOKEN, token_ends_s=time.time() + 600)
    assert len(kept(here)) == 2
    if end == "failed":
        here.run()
    elif end == "cancelled":
        here.cancel(first.turn_id)
        here.run()
    else:
        here.cancel(second.turn_id)
        assert len(kept(here)) == 1
        here.run()
    assert kept(here) == []


def test_an_expired_token_is_told_to_the_model_and_the_tool_is_not_asked(turnmill: Turnmill) -> None:
    model = ScriptedModel([[LOOK], "I may not."])
    here = place(turnmill, replace(agent([]), model=model))
    turn = ask(here, for_s=-1)
    assert here.mesh.asked == [], "in nobody's name"
    assert turn["calls"][0]["error"]["code"] == "unauthorized" and turn["answer"] == "I may not."
    read = model.requests[1].messages[-1]["content"]
    assert "unauthorized" in read and "expired" in read and "SECRET" not in read


def test_one_that_expires_while_a_human_decides_runs_nothing(turnmill: Turnmill) -> None:
    here = place(turnmill, agent([[LOOK], "I may not."], approvals={"crm/look": Gate()}))
    turn = here.submit("desk", "go", token=TOKEN, token_ends_s=time.time() + 600)
    here.run()
    client = here.ports.store.client
    assert client.pttl(kept(here)[0]) > 0, "Redis itself forgets it when it has expired"
    client.delete(*kept(here))
    approval = here.approvals()[0]
    here.decide(approval["approval_id"], True, by=replace(ANN, scopes=("approvals:decide",)))
    here.run()
    assert here.mesh.asked == []
    assert here.turn(turn.turn_id)["calls"][0]["error"]["code"] == "unauthorized"


def test_a_handoff_to_an_agent_that_forwards_takes_the_token_along(turnmill: Turnmill) -> None:
    first = agent([[LOOK], [("transfer_to_desk", {})]], "front", forward=False, handoffs=["desk"])
    here = place(turnmill, first, agent([[LOOK], "done"]))
    assert ask(here, "front")["answer"] == "done"
    assert sent(here) == ["", TOKEN], "each agent by its own rule"
    assert kept(here) == []


def test_an_agent_that_is_asked_as_a_tool_forwards_by_its_own_rule(turnmill: Turnmill) -> None:
    boss = Agent("boss", ScriptedModel([[("agent-desk", {"input": "look"})], "done"]), tools=[AgentTool("desk")])
    here = place(turnmill, boss, agent([[LOOK], "found"]))
    assert ask(here, "boss")["answer"] == "done"
    assert sent(here) == [TOKEN] and kept(here) == []


def test_during_a_change_of_keys_both_open_and_one_that_is_gone_opens_nothing(turnmill: Turnmill) -> None:
    old, new = key(), key()
    sealed = TokenSeal(Settings(token_key=old)).seal(TOKEN, ANN)
    assert TokenSeal(Settings(token_key=f"{new} {old}")).open(sealed, ANN) == TOKEN
    with pytest.raises(Unauthorized, match="has changed"):
        TokenSeal(Settings(token_key=new)).open(sealed, ANN)
    here = place(turnmill, agent([[LOOK], "I may not."]))
    turn = here.submit("desk", "go", token=TOKEN, token_ends_s=time.time() + 600)
    here.ports = replace(here.ports, seal=TokenSeal(Settings(token_key=new)))
    here.run()
    assert here.mesh.asked == [] and here.turn(turn.turn_id)["calls"][0]["error"]["code"] == "unauthorized"


@pytest.mark.parametrize("other", [replace(ANN, sub="bob"), replace(ANN, tenant="other")])
def test_what_was_sealed_for_one_opens_for_nobody_else(other: Principal) -> None:
    seal = TokenSeal(Settings(token_key=key()))
    sealed = seal.seal(TOKEN, ANN)
    assert sealed != seal.seal(TOKEN, ANN), "no two alike"
    with pytest.raises(Unauthorized):
        seal.open(sealed, other)


def test_the_same_key_with_a_newer_token_is_the_same_turn(turnmill: Turnmill) -> None:
    here = place(turnmill, agent(["done"]))
    made = [here.submit("desk", "go", idempotency_key="k", token=f"ey.{n}.x", token_ends_s=time.time() + 600) for n in range(2)]
    assert made[0].turn_id == made[1].turn_id


def test_without_a_key_of_the_settings_an_agent_that_forwards_is_refused_at_start(turnmill: Turnmill) -> None:
    here = turnmill()
    project = collect([agent(["done"])], "here")
    with pytest.raises(Misconfigured, match="TURNMILL_TOKEN_KEY"):
        make_ports(Settings(), project, here.ports.store, here.queue, here.mesh)


@pytest.mark.parametrize("wrong", ["short", base64.b64encode(b"x" * 31).decode(), f"{key()} oops"])
def test_a_key_that_is_none_is_refused_without_being_shown(wrong: str) -> None:
    with pytest.raises(Misconfigured, match=r"TURNMILL_TOKEN_KEY: .*32 bytes in base64") as refused:
        load_settings(token_key=wrong)
    assert wrong not in str(refused.value)


def test_no_text_that_is_made_of_what_holds_it_shows_it(caplog: pytest.LogCaptureFixture, turnmill: Turnmill) -> None:
    caplog.set_level(logging.DEBUG)
    caller = Caller(ANN, expires_at=1.0, token=TOKEN)
    query = ToolQuery("crm/look", {}, "c", "acme", "ann", forwarded_token=TOKEN)
    for holder in (caller, query, Submission("desk", "go", ANN, token=TOKEN)):
        assert "SECRET" not in repr(holder) and "SECRET" not in str(holder)
    assert "SECRET" not in str(caller.as_json())
    here = place(turnmill, agent([[LOOK], "done"]))
    turn = ask(here)
    assert sent(here) == [TOKEN]
    assert "SECRET" not in caplog.text and "SECRET" not in str(turn)
    assert "SECRET" not in str(here.frames(turn["conversation_id"]))


def test_our_tool_hosts_take_callers_tokens_only_where_the_settings_say_so() -> None:
    provider = "a-secret-of-an-identity-provider-32-bytes"
    claims = {"sub": "ann", "tenant": "acme", "roles": ["clerk"], "exp": time.time() + 60}
    own, stranger = (jwt.encode(claims, secret, algorithm="HS256") for secret in (provider, "another-secret-of-at-least-32-bytes!!"))
    assert callers_of(Settings(jwt_secret=provider)) is None
    with pytest.raises(Unauthorized):
        verify(own, "crm/look", secret="mesh", callers=None)
    callers = callers_of(Settings(jwt_secret=provider, mesh_caller_tokens=True))
    assert verify(own, "crm/look", secret="mesh", callers=callers) == Asker("ann", "acme", ("clerk",))
    for refused in (stranger, "", "no token", jwt.encode(claims | {"exp": 1}, provider, algorithm="HS256")):
        with pytest.raises(Unauthorized):
            verify(refused, "crm/look", secret="mesh", callers=callers)
    with pytest.raises(Misconfigured, match="TURNMILL_MESH_CALLER_TOKENS"):
        callers_of(Settings(mesh_caller_tokens=True))
