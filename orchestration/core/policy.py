"""An agent's policy: a function of the user's that sees each call before it runs and says allow, deny or ask a human.

What it says is taken fail closed: it cannot waive a gate, and one that raises or answers nonsense lets nothing run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from orchestration.core.gate import Gate, gate_for, owner_reason
from orchestration.core.principal import Principal
from orchestration.core.tool import ToolSpec


@dataclass(frozen=True, slots=True)
class PolicyCall:
    """What a policy sees: one call with arguments that fit the tool's schema, and the turn that it belongs to.

    `name` is the tool as the model calls it, `prefix` its key on the mesh. `principal` submitted the turn.
    """

    name: str
    prefix: str
    arguments: dict[str, Any]
    agent: str = ""
    turn_id: str = ""
    conversation_id: str = ""
    principal: Principal | None = None


@dataclass(frozen=True, slots=True)
class Allow:
    """The policy asks for nothing. A gate of the owner's or of the agent's `approvals` stands all the same."""


@dataclass(frozen=True, slots=True)
class Deny:
    """The call does not run; the model reads `reason`."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Ask:
    """A human is asked: by `gate`, or, without one, by the gate that the call has anyway, or a plain one."""

    gate: Gate | None = None
    reason: str = ""


Verdict = Allow | Deny | Ask

#: A user's policy. It runs in the middle of a step, so it should be quick (30 s at most, in a thread of its own); None means `Allow()`.
Policy = Callable[[PolicyCall], Verdict | None]


@dataclass(frozen=True, slots=True)
class PolicyFailed:
    """The policy gave no verdict: it raised, or answered something else. `why` names the kind of failure, never its text."""

    why: str


def verdict_of(policy: Policy | None, call: PolicyCall) -> Verdict | PolicyFailed:
    """What `policy` says of `call`; never raises."""
    if policy is None:
        return Allow()
    try:
        said = policy(call)
    except (Exception, SystemExit) as error:  # a policy that calls exit() is no reason to stop a worker
        return PolicyFailed(type(error).__name__)
    if said is None:
        return Allow()
    if not isinstance(said, (Allow, Deny, Ask)):
        return PolicyFailed(f"answered {type(said).__name__}")
    wrong = isinstance(said, (Deny, Ask)) and not isinstance(said.reason, str)
    wrong = wrong or (isinstance(said, Ask) and not (said.gate is None or isinstance(said.gate, Gate)))
    return PolicyFailed(f"answered {type(said).__name__} with something else in it") if wrong else said


#: A policy as a round applies it: from a tool's name, its key and the arguments to a verdict.
Rule = Callable[[str, str, dict[str, Any]], Verdict | PolicyFailed]


def no_rule(name: str, prefix: str, arguments: dict[str, Any]) -> Verdict:
    """The rule of an agent without a policy."""
    return Allow()


def ruled_gate(said: Verdict, spec: ToolSpec, refinements: Mapping[str, Gate] | None) -> Gate | None:
    """The gate of a call of `spec` once the policy has spoken: what it asks for refines what the call has anyway, and takes none away."""
    gate = gate_for(spec, refinements)
    if not isinstance(said, Ask):
        return gate
    wanted = said.gate or gate or Gate()
    return replace(wanted, reason=said.reason or wanted.reason or owner_reason(spec))
