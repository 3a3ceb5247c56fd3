"""The Standard Webhooks signature scheme (standardwebhooks.com): `webhook-id`, `webhook-timestamp`, `webhook-signature` over the raw body.

Verified here and not by the reference package, which reads the body as text and gives up at the first signature that it cannot read;
several signatures in one header are how senders change their secrets.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import time
from collections.abc import Callable, Mapping

from orchestration.core.agent import StandardWebhooks
from orchestration.core.errors import BadSignature, Misconfigured

#: How far a timestamp may be from now, in seconds: the scheme's own bound.
TOLERANCE_S = 300

#: Signatures of one header that are looked at.
_MAX_SIGNATURES = 16


class StandardVerifier:
    """Checks requests against the secrets in the scheme's environment variable.

    Raises:
        Misconfigured: the variable is not set, or a secret in it is not base64.
    """

    def __init__(self, scheme: StandardWebhooks, environ: Mapping[str, str], now: Callable[[], float] = time.time) -> None:
        secrets = environ.get(scheme.secret_env, "").split()
        if not secrets:
            raise Misconfigured(f"StandardWebhooks(secret_env={scheme.secret_env!r}): this environment variable is not set")
        self._secrets = [_decoded(secret, scheme.secret_env) for secret in secrets]
        self._now = now

    def verify(self, headers: Mapping[str, str], body: bytes) -> str:
        """The delivery's id, if one of the secrets signed this body a short time ago.

        Args:
            headers: with lower-case names.

        Raises:
            BadSignature: a header is missing, the time is more than 5 minutes off, or no signature fits.
        """
        delivery = headers.get("webhook-id", "")
        stamp = headers.get("webhook-timestamp", "")
        signatures = headers.get("webhook-signature", "")
        if not (delivery and stamp and signatures):
            raise BadSignature("webhook-id, webhook-timestamp and webhook-signature are needed")
        if not re.fullmatch(r"[0-9]{1,12}", stamp):
            raise BadSignature("webhook-timestamp is the time in whole seconds since 1970")
        if abs(self._now() - int(stamp)) > TOLERANCE_S:
            raise BadSignature(f"webhook-timestamp is more than {TOLERANCE_S} s from now")
        signed = f"{delivery}.{stamp}.".encode("utf-8", "replace") + body
        expected = [hmac.new(secret, signed, hashlib.sha256).digest() for secret in self._secrets]
        for signature in signatures.split()[:_MAX_SIGNATURES]:
            version, _, encoded = signature.partition(",")
            given = _signature(encoded) if version == "v1" else b""
            if sum(hmac.compare_digest(given, one) for one in expected):  # all are compared, whichever fits
                return delivery
        raise BadSignature("no signature fits the body")


def _decoded(secret: str, variable: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix("whsec_") + "==", validate=False)
    except (binascii.Error, ValueError):
        key = b""
    if not key:
        raise Misconfigured(f"{variable}: a secret is whsec_ and base64")
    return key


def _signature(encoded: str) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return b""
