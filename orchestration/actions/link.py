"""Decision links: a signed URL with which one named principal decides one approval, once, in a browser. Opening it decides nothing.

The link stands for the principal as it was when the link was made; what it may decide is checked again when it decides.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import jwt

from orchestration.actions.decide import decide
from orchestration.core.approval import Approval, ApprovalState, as_api, may_decide, refuse_ended
from orchestration.core.audit import AuditEvent, audit_entry
from orchestration.core.errors import AlreadyDecided, Forbidden, Invalid, NotFound
from orchestration.core.principal import Principal, Scope
from orchestration.core.times import rfc3339
from orchestration.wiring import Ports

#: How long a link is good unless told otherwise, and at most, in seconds. It ends with the approval's own time in any case.
DEFAULT_S, MAX_S = 86_400.0, 30 * 86_400.0

#: A longer text is no link of ours, in characters.
MAX_CHARS = 4096

_ALGORITHM = "HS256"


@dataclass(frozen=True, slots=True)
class Link:
    """A link that holds: for whom it decides, about what, and its own id."""

    principal: Principal
    approval: Approval
    id: str
    expires_at: int


def make_link(
    ports: Ports, principal: Principal, approval_id: str, *, sub: str | None = None, timeout_s: float | None = None, source: str = ""
) -> tuple[str, str | None]:
    """A new link's token, and until when it is good (RFC 3339).

    Args:
        sub: for whom it decides, where that is not `principal`; needs the scope `admin`, and the one named gets the roles of `principal`.
        timeout_s: seconds for which it is good.

    Raises:
        NotFound: there is no such approval of the principal's tenant.
        Forbidden: the principal may not decide it, or not make links for others; where a gate wants several people, or another than the
            submitter, nobody may, since whoever made the link could also open it.
        Invalid: a time or a name that cannot be.
        AlreadyDecided, ApprovalExpired, ApprovalCancelled: there is nothing to decide any more.
    """
    if sub is not None and sub != principal.sub:
        principal.require(Scope.ADMIN)
        if not 1 <= len(sub) <= 200:
            raise Invalid("the sub does not fit", [{"loc": ["sub"], "msg": "1 to 200 characters"}])
    if timeout_s is not None and not 0 < timeout_s <= MAX_S:
        raise Invalid("timeout_s does not fit", [{"loc": ["timeout_s"], "msg": f"more than 0 and at most {MAX_S:.0f} seconds"}])
    named = Principal(sub or principal.sub, principal.tenant, principal.roles, (str(Scope.APPROVALS_DECIDE),))
    approval = ports.approvals.get(principal.tenant, approval_id)
    principal.require(Scope.APPROVALS_DECIDE)
    if named.sub != principal.sub and (approval.gate.quorum > 1 or approval.gate.four_eyes):
        raise Forbidden(f"approval {approval_id} wants different people to decide: everybody makes a link for himself")
    may_decide(approval, named)
    refuse_ended(approval)
    if approval.state is not ApprovalState.PENDING:
        raise AlreadyDecided(f"approval {approval_id} was {approval.state} by {approval.decided_by}", as_api(approval))
    expires_at = ports.approvals.now_ms() + round((timeout_s or DEFAULT_S) * 1000)
    if approval.expires_at:
        expires_at = min(expires_at, approval.expires_at)
    claims = {
        "aud": f"approval/{approval_id}",
        "sub": named.sub,
        "tenant": named.tenant,
        "roles": list(named.roles),
        "jti": secrets.token_hex(8),
        "until": expires_at,
    }
    decided: dict[str, Any] = {"link_of": named.sub, "expires_at": rfc3339(expires_at)}
    ports.approvals.note(approval, audit_entry(AuditEvent.LINKED, approval, by=principal.sub, source=source, decided=decided))
    return jwt.encode(claims, _key(ports), algorithm=_ALGORITHM), rfc3339(expires_at)


def open_link(ports: Ports, approval_id: str, token: str) -> Link:
    """What a link is about; changes nothing.

    Raises:
        NotFound: it is no link of ours, is for another approval, or its time is up.
    """
    gone = NotFound("this link is not valid, or not any more")
    if not 0 < len(token) <= MAX_CHARS or not token.isascii():
        raise gone
    try:
        claims = jwt.decode(
            token,
            _key(ports),
            algorithms=[_ALGORITHM],
            audience=f"approval/{approval_id}",
            options={"require": ["aud", "sub", "jti"]},
        )
    except jwt.PyJWTError:
        raise gone from None
    if ports.approvals.now_ms() >= int(claims["until"]):
        raise gone
    principal = Principal(claims["sub"], claims["tenant"], tuple(claims["roles"]), (str(Scope.APPROVALS_DECIDE),))
    return Link(principal, ports.approvals.get(principal.tenant, approval_id), claims["jti"], int(claims["until"]))


def decide_by_link(ports: Ports, approval_id: str, token: str, approved: bool, note: str = "", source: str = "link") -> dict[str, Any]:
    """Decide with a link, as `decide` does; a link that has decided decides nothing else.

    Raises:
        NotFound: see `open_link`.
        AlreadyDecided, ApprovalExpired, ApprovalCancelled, Forbidden: see `core.approval.settle`.
    """
    link = open_link(ports, approval_id, token)
    return decide(ports, link.principal, approval_id, approved, note=note, source=source, link=link.id)


def _key(ports: Ports) -> bytes:
    return bytes.fromhex(ports.secrets.get("links"))
