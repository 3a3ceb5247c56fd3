"""Gates: which tool calls need a human, who may decide, for how long, and why. Fail closed: an owner's demand can be
refined, never waived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

from orchestration.core.errors import Misconfigured
from orchestration.core.keys import matches, precedence
from orchestration.core.tool import ToolSpec

#: How long an owner's plain `approval=` waits for a human, in seconds: 24 h.
OWNER_TIMEOUT_S = 86_400.0

#: The longest time that a gate may name, in seconds; who wants longer waits for ever.
MAX_TIMEOUT_S = 10 * 366 * 86_400.0

#: The largest quorum.
MAX_QUORUM = 100


class OnExpiry(StrEnum):
    """What happens when nobody decided in time."""

    REFUSE = "refuse"  #: the call does not run, the model reads why, the turn goes on
    END_TURN = "end_turn"  #: the call does not run, and the turn ends
    ESCALATE = "escalate"  #: others are asked, with a new deadline
    HOLD = "hold"  #: the turn waits on, until somebody has the request reopened


@dataclass(frozen=True, slots=True)
class Gate:
    """The rule that a tool needs an approval.

    Args:
        timeout_s: seconds until the request expires; None waits for ever.
        roles: one of these is needed to decide; none named means anybody of the tenant with `approvals:decide`.
        reason: what the human reads.
        on_expiry: what happens then: `refuse`, `end_turn`, `escalate` or `hold`.
        escalate_to: the roles that are asked next, with `on_expiry="escalate"`; when they let it expire too, it is refused.
        escalate_timeout_s: seconds that those have; None means as long as the first had.
        remind_before_s: seconds before its expiry at which watchers and the callback are reminded; None for no reminder.
        quorum: how many different principals must approve; one denial is always enough.
        four_eyes: whoever submitted the turn may not decide.
        deadline_runs: the turn's own deadline goes on while a human is asked; otherwise it stands still.

    Raises:
        Misconfigured: a value that cannot work, named.
    """

    timeout_s: float | None = OWNER_TIMEOUT_S
    roles: Sequence[str] = ()
    reason: str = ""
    on_expiry: OnExpiry | str = OnExpiry.REFUSE
    escalate_to: Sequence[str] = ()
    escalate_timeout_s: float | None = None
    remind_before_s: float | None = None
    quorum: int = 1
    four_eyes: bool = False
    deadline_runs: bool = False

    def __post_init__(self) -> None:
        for name in ("roles", "escalate_to"):
            _refuse_unless(_are_roles(getattr(self, name)), name, getattr(self, name), "a list of role names")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _refuse_unless(isinstance(self.reason, str), "reason", self.reason, "text")
        for name in ("four_eyes", "deadline_runs"):
            _refuse_unless(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        for name in ("timeout_s", "escalate_timeout_s", "remind_before_s"):
            value = getattr(self, name)
            _refuse_unless(value is None or _is_time(value), name, value, "a positive number of seconds up to ten years, or None")
        if self.on_expiry not in tuple(OnExpiry):
            raise Misconfigured(f"Gate(on_expiry={self.on_expiry!r}): one of {', '.join(OnExpiry)}")
        object.__setattr__(self, "on_expiry", OnExpiry(self.on_expiry))
        quorum_fits = isinstance(self.quorum, int) and not isinstance(self.quorum, bool) and 1 <= self.quorum <= MAX_QUORUM
        _refuse_unless(quorum_fits, "quorum", self.quorum, f"a whole number from 1 to {MAX_QUORUM}")
        if (self.on_expiry is OnExpiry.ESCALATE) != bool(self.escalate_to):
            raise Misconfigured("Gate: on_expiry='escalate' and escalate_to=[…] go together; one of them is missing")
        if self.timeout_s is None and (self.on_expiry is not OnExpiry.REFUSE or self.remind_before_s is not None):
            raise Misconfigured("Gate(timeout_s=None): it never expires, so on_expiry and remind_before_s mean nothing")
        if self.timeout_s is not None and self.remind_before_s is not None and self.remind_before_s >= self.timeout_s:
            raise Misconfigured(f"Gate(remind_before_s={self.remind_before_s!r}): less than timeout_s, {self.timeout_s!r}")

    def escalated(self) -> Gate:
        """The gate under which others are asked after this one's time was up."""
        timeout_s = self.escalate_timeout_s or self.timeout_s
        remind = self.remind_before_s
        return replace(
            self,
            timeout_s=timeout_s,
            roles=self.escalate_to,
            on_expiry=OnExpiry.REFUSE,
            escalate_to=(),
            escalate_timeout_s=None,
            remind_before_s=remind if remind is not None and timeout_s is not None and remind < timeout_s else None,
        )

    def as_json(self) -> dict[str, Any]:
        """A JSON object with what is not the default, since each waiting approval holds one; `Gate(**…)` takes it back."""
        return {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}


def gate_for(spec: ToolSpec, refinements: Mapping[str, Gate] | None) -> Gate | None:
    """The gate of a call of `spec`: the agent's refinement where one matches, else the owner's demand, else none.

    A refinement is for a key, a key expression, or the name by which the model calls the tool. The most specific one wins (see
    `keys.precedence`). The owner's reason stands where it has none.
    """
    refined = _refinement(spec, refinements or {})
    if refined is not None:
        return refined if refined.reason else replace(refined, reason=owner_reason(spec))
    return Gate(reason=owner_reason(spec)) if spec.approval else None


def owner_reason(spec: ToolSpec) -> str:
    """Why the tool's owner wants an approval; empty when it does not say."""
    return spec.approval if isinstance(spec.approval, str) else ""


def _refinement(spec: ToolSpec, refinements: Mapping[str, Gate]) -> Gate | None:
    for pattern in sorted(refinements, key=precedence):
        if matches(pattern, spec.prefix) or pattern == spec.name:
            return refinements[pattern]
    return None


def missing_gates(specs: Sequence[ToolSpec]) -> list[str]:
    """The keys of those tools whose owner demands an approval."""
    return [spec.prefix for spec in specs if spec.approval]


def _refuse_unless(fits: bool, name: str, value: object, wanted: str) -> None:
    if not fits:
        raise Misconfigured(f"Gate({name}={value!r}): {wanted}")


def _are_roles(value: object) -> bool:
    return isinstance(value, (list, tuple, set, frozenset)) and all(isinstance(role, str) and role for role in value)


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= MAX_TIMEOUT_S
