"""Stripe's signature scheme, which others copied: `t=<time>,v1=<hex>,…` over the time and the raw body. Only v1 counts.

Rules: https://docs.stripe.com/webhooks/signature
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from typing import Any

from gateway.webhooks.delivery import Delivery, Meaning, fresh, require_one_of, secrets_in
from orchestration.core.errors import BadSignature
from orchestration.core.webhook import StripeWebhooks


class StripeVerifier:
    """Checks deliveries against the secrets in the scheme's environment variable; raises Misconfigured when it is not set."""

    def __init__(self, scheme: StripeWebhooks, environ: Mapping[str, str], now: Callable[[], float] = time.time) -> None:
        self._secrets = secrets_in(environ, scheme.secret_env)
        self._scheme = scheme
        self._now = now

    def prove(self, delivery: Delivery) -> None:
        """Raises BadSignature: the header is missing, its time is more than 5 minutes off, or none of its signatures fits."""
        header = delivery.headers.get(self._scheme.header.lower(), "")
        pairs = [part.strip().partition("=") for part in header.split(",")]
        times = [value for name, _, value in pairs if name == "t"]
        given = [value.encode("utf-8", "replace") for name, _, value in pairs if name == "v1"]
        if len(times) != 1 or not given:
            raise BadSignature(f"{self._scheme.header} is needed: one t= and a v1=")
        fresh(times[0], self._now(), f"the time in {self._scheme.header}")
        signed = times[0].encode() + b"." + delivery.body
        require_one_of([hmac.new(secret, signed, hashlib.sha256).hexdigest().encode() for secret in self._secrets], given)

    def meaning(self, delivery: Delivery, json: Any, form: Mapping[str, str]) -> Meaning:
        """The delivery's id is the event's."""
        id_ = json.get(self._scheme.id_field) if isinstance(json, dict) else None
        return Meaning(str(id_) if isinstance(id_, (str, int)) and id_ else delivery.digest())
