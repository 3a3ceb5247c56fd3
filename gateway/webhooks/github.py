"""GitHub's signature scheme: `X-Hub-Signature-256: sha256=<hex>` over the raw body. The older `X-Hub-Signature` (SHA-1) is not taken.

Rules: https://docs.github.com/en/webhooks/using-webhooks/validating-webhook-deliveries
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Any

from gateway.webhooks.delivery import Delivery, Meaning, require_one_of, secrets_in
from orchestration.core.errors import BadSignature
from orchestration.core.webhook import GitHubWebhooks


class GitHubVerifier:
    """Checks deliveries against the secrets in the scheme's environment variable; raises Misconfigured when it is not set."""

    def __init__(self, scheme: GitHubWebhooks, environ: Mapping[str, str]) -> None:
        self._secrets = secrets_in(environ, scheme.secret_env)

    def prove(self, delivery: Delivery) -> None:
        """Raises BadSignature: the header is missing or does not fit."""
        given = delivery.headers.get("x-hub-signature-256", "")
        if not given.startswith("sha256="):
            raise BadSignature("X-Hub-Signature-256 is needed: sha256= and the signature in hexadecimal")
        expected = [b"sha256=" + hmac.new(secret, delivery.body, hashlib.sha256).hexdigest().encode() for secret in self._secrets]
        require_one_of(expected, [given.encode("utf-8", "replace")])

    def meaning(self, delivery: Delivery, json: Any, form: Mapping[str, str]) -> Meaning:
        """The delivery's id is `X-GitHub-Delivery`, which GitHub keeps when it sends again."""
        id_ = delivery.headers.get("x-github-delivery") or delivery.digest()
        return Meaning(id_, ignored=delivery.headers.get("x-github-event") == "ping")
