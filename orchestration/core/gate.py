"""Gates: which tool calls need a human, who may decide, for how long, and why. Fail closed: an owner's demand can be
refined, never waived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orchestration.core.errors import Misconfigured
from orchestration.core.keys import matches
from orchestration.core.tool import ToolSpec

#: How long an owner's plain `approval=` waits for a human, in seconds: 24 h.
OWNER_TIMEOUT_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Gate:
    """The rule that a tool needs an approval.

    Args:
        timeout_s: seconds until the request expires; None waits for ever.
        roles: one of these is needed to decide; none named means anybody of the tenant with `approvals:decide`.
        reason: what the human reads.
    """

    timeout_s: float | None = OWNER_TIMEOUT_S
    roles: Sequence[str] = ()
    reason: str = ""

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise Misconfigured(f"Gate(timeout_s={self.timeout_s!r}): a positive number of seconds, or None")
        if isinstance(self.roles, str):
            raise Misconfigured(f"Gate(roles={self.roles!r}): a list of role names")
        object.__setattr__(self, "roles", tuple(self.roles))

    def as_json(self) -> dict[str, Any]:
        """A JSON object; `Gate(**…)` takes it back."""
        return asdict(self)


def gate_for(spec: ToolSpec, refinements: dict[str, Gate] | None) -> Gate | None:
    """The gate of a call of `spec`: the agent's refinement where one matches, else the owner's demand, else none.

    The most specific pattern wins (the longest without wildcards); the owner's reason stands where the refinement has none.
    """
    owner_reason = spec.approval if isinstance(spec.approval, str) else ""
    best = None
    for pattern in sorted(refinements or {}, key=lambda p: (p.count("*"), -len(p), p)):
        if matches(pattern, spec.prefix):
            best = (refinements or {})[pattern]
            break
    if best is not None:
        return Gate(best.timeout_s, best.roles, best.reason or owner_reason)
    if spec.approval:
        return Gate(reason=owner_reason)
    return None


def missing_gates(specs: Sequence[ToolSpec]) -> list[str]:
    """The keys of those tools whose owner demands an approval."""
    return [spec.prefix for spec in specs if spec.approval]
