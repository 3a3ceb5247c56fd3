"""Who asks: the principal of a request, a webhook or a mesh query, and what it may do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from orchestration.core.errors import Forbidden


class Scope(StrEnum):
    """What a principal may do."""

    TURNS_WRITE = "turns:write"  #: submit, steer and cancel turns
    TURNS_READ = "turns:read"  #: read turns, conversations and frames
    APPROVALS_READ = "approvals:read"  #: list and read approvals
    APPROVALS_DECIDE = "approvals:decide"  #: decide approvals, within their roles
    ADMIN = "admin"  #: read the audit stream


ALL_SCOPES = tuple(str(scope) for scope in Scope)

#: The role that stands for every role; only the development principal has it.
ANY_ROLE = "*"


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks, and for which tenant. It is stored with a turn; its token never is."""

    sub: str
    tenant: str
    roles: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()

    def require(self, scope: Scope) -> None:
        """Raises Forbidden unless the principal has `scope`."""
        if scope not in self.scopes:
            raise Forbidden(f"{self.sub!r} lacks the scope {scope}")

    def has_role(self, roles: tuple[str, ...]) -> bool:
        """Whether it has one of `roles`; no roles named means that none is needed."""
        return not roles or ANY_ROLE in self.roles or any(role in self.roles for role in roles)

    def as_json(self) -> dict[str, Any]:
        """A JSON object; `from_json` takes it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Principal:
        return cls(data["sub"], data["tenant"], tuple(data.get("roles", ())), tuple(data.get("scopes", ())))


#: Who asks in development, where the gateway serves loopback without keys.
DEVELOPER = Principal(sub="dev", tenant="dev", roles=(ANY_ROLE,), scopes=ALL_SCOPES)
