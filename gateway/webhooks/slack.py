"""Slack's signature scheme v0: `X-Slack-Signature` over the time in `X-Slack-Request-Timestamp` and the raw body.

Rules: https://docs.slack.dev/authentication/verifying-requests-from-slack
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from typing import Any

from gateway.webhooks.delivery import Delivery, Meaning, Reply, fresh, require_one_of, secrets_in
from orchestration.core.errors import BadRequest, BadSignature
from orchestration.core.webhook import SlackWebhooks


class SlackVerifier:
    """Checks deliveries against the signing secrets in the scheme's environment variable; raises Misconfigured when it is not set."""

    def __init__(self, scheme: SlackWebhooks, environ: Mapping[str, str], now: Callable[[], float] = time.time) -> None:
        self._secrets = secrets_in(environ, scheme.secret_env)
        self._now = now

    def prove(self, delivery: Delivery) -> None:
        """Raises BadSignature: a header is missing, the time is more than 5 minutes off, or the signature does not fit."""
        stamp = delivery.headers.get("x-slack-request-timestamp", "")
        given = delivery.headers.get("x-slack-signature", "")
        if not (stamp and given):
            raise BadSignature("X-Slack-Request-Timestamp and X-Slack-Signature are needed")
        fresh(stamp, self._now(), "X-Slack-Request-Timestamp")
        signed = b"v0:" + stamp.encode() + b":" + delivery.body
        expected = [b"v0=" + hmac.new(secret, signed, hashlib.sha256).hexdigest().encode() for secret in self._secrets]
        require_one_of(expected, [given.encode("utf-8", "replace")])

    def meaning(self, delivery: Delivery, json: Any, form: Mapping[str, str]) -> Meaning:
        """An event's id is its `event_id`, the same in every retry; commands and interactions are not sent again, and have none."""
        if form:
            # Whatever stands in the answer to a command would be shown to the person who gave it.
            return Meaning(f"{delivery.headers['x-slack-request-timestamp']}.{delivery.digest()}", Reply.EMPTY, ignored="ssl_check" in form)
        if not isinstance(json, dict):
            raise BadRequest("an event of Slack is a JSON object")
        if json.get("type") == "url_verification":
            return Meaning(None, Reply.OK, answer={"challenge": str(json.get("challenge", ""))})
        id_ = json.get("event_id")
        return Meaning(id_ if isinstance(id_, str) and id_ else delivery.digest(), Reply.OK)
