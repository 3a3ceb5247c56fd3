"""The Standard Webhooks signature scheme (standardwebhooks.com): `webhook-id`, `webhook-timestamp`, `webhook-signature` over the raw body.

Verified here and not by the reference package, which reads the body as text and gives up at the first signature that it cannot read;
several signatures in one header are how senders change their secrets.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from typing import Any

from gateway.webhooks.delivery import Delivery, Meaning, fresh, require_one_of, secrets_in
from orchestration.core.errors import BadSignature, Misconfigured
from orchestration.core.webhook import StandardWebhooks


class StandardVerifier:
    """Checks deliveries against the secrets in the scheme's environment variable.

    Raises:
        Misconfigured: the variable is not set, or a secret in it is not base64.
    """

    def __init__(self, scheme: StandardWebhooks, environ: Mapping[str, str], now: Callable[[], float] = time.time) -> None:
        self._secrets = [_decoded(secret, scheme.secret_env) for secret in secrets_in(environ, scheme.secret_env)]
        self._now = now

    def prove(self, delivery: Delivery) -> None:
        """Raises BadSignature: a header is missing, the time is more than 5 minutes off, or no signature fits."""
        id_ = delivery.headers.get("webhook-id", "")
        stamp = delivery.headers.get("webhook-timestamp", "")
        signatures = delivery.headers.get("webhook-signature", "")
        if not (id_ and stamp and signatures):
            raise BadSignature("webhook-id, webhook-timestamp and webhook-signature are needed")
        fresh(stamp, self._now(), "webhook-timestamp")
        signed = f"{id_}.{stamp}.".encode("utf-8", "replace") + delivery.body
        given = [_signature(text) for text in signatures.split()]
        require_one_of([hmac.new(secret, signed, hashlib.sha256).digest() for secret in self._secrets], given)

    def meaning(self, delivery: Delivery, json: Any, form: Mapping[str, str]) -> Meaning:
        """The delivery's id is `webhook-id`."""
        return Meaning(delivery.headers["webhook-id"])


def _decoded(secret: bytes, variable: str) -> bytes:
    encoded = secret.removeprefix(b"whsec_")
    try:
        key = base64.b64decode(encoded + b"=" * (-len(encoded) % 4), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not key:
        raise Misconfigured(f"{variable}: a secret is whsec_ and base64")
    return key


def _signature(text: str) -> bytes:
    version, _, encoded = text.partition(",")
    if version != "v1":
        return b""
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return b""
