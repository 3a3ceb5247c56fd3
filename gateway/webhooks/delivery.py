"""A delivery as it came in, what a signature scheme makes of it, and the rules that all schemes share: secrets, clock, comparison.

A scheme is one file beside this one with a `Verifier`. It first proves the raw bytes, and only then is the body read.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from orchestration.core.errors import BadSignature, Misconfigured

#: How far a signed time may be from now, in seconds.
TOLERANCE_S = 300

#: Signatures of one header that are looked at.
MAX_SIGNATURES = 16


@dataclass(frozen=True, slots=True)
class Delivery:
    """One request as it came in. `headers` have lower-case names; `urls` are those that the sender may have called, likeliest first."""

    headers: Mapping[str, str]
    body: bytes
    urls: tuple[str, ...] = ()

    def digest(self) -> str:
        """The hash of the body: tells deliveries apart where the sender numbers none."""
        return hashlib.sha256(self.body).hexdigest()


class Reply(StrEnum):
    """What the sender's protocol wants to hear about a delivery that was taken."""

    ACCEPTED = "accepted"  #: 202 with the turn, 204 where there is none
    OK = "ok"  #: 200 with the turn, or with nothing
    EMPTY = "empty"  #: 200 without a body: the sender would show it to somebody
    TWIML = "twiml"  #: 200 with TwiML that says nothing


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a proven delivery is: its id (None where the sender gives none), and how it is answered.

    `answer` is the JSON answer of a handshake, which means no turn; `ignored` says that it means none either.
    """

    id: str | None
    reply: Reply = Reply.ACCEPTED
    answer: Mapping[str, Any] | None = None
    ignored: bool = False


class Verifier(Protocol):
    """One signature scheme with its secrets."""

    def prove(self, delivery: Delivery) -> None:
        """Raises BadSignature unless somebody with a secret sent this."""
        ...

    def meaning(self, delivery: Delivery, json: Any, form: Mapping[str, str]) -> Meaning:
        """What a proven delivery is; `json` and `form` are its body, as far as it is either."""
        ...


def secrets_in(environ: Mapping[str, str], variable: str) -> list[bytes]:
    """The secrets in an environment variable, separated by space; raises Misconfigured when there is none."""
    found = environ.get(variable, "").split()
    if not found:
        raise Misconfigured(f"{variable}: a webhook's secret is expected in this environment variable, which is not set")
    return [secret.encode() for secret in found]


def fresh(stamp: str, now_s: float, what: str) -> int:
    """The time in `stamp`, in seconds since 1970.

    Raises:
        BadSignature: it is none, or more than 5 minutes off.
    """
    if not re.fullmatch(r"[0-9]{1,12}", stamp):
        raise BadSignature(f"{what} is the time in whole seconds since 1970")
    if abs(now_s - int(stamp)) > TOLERANCE_S:
        raise BadSignature(f"{what} is more than {TOLERANCE_S} s from now")
    return int(stamp)


def require_one_of(expected: Iterable[bytes], given: Iterable[bytes]) -> None:
    """Raises BadSignature unless one of `given` is one of `expected`; the time that it takes does not tell which was nearly right."""
    wanted = list(expected)
    shown = list(given)[:MAX_SIGNATURES]
    if not sum(hmac.compare_digest(one, other) for one in shown for other in wanted):
        raise BadSignature("no signature fits the body")
