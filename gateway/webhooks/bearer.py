"""The plainest scheme: a shared secret as `Authorization: Bearer …`. It proves who sent, not what, and can be recorded and sent again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.webhooks.delivery import Delivery, Meaning, require_one_of, secrets_in
from orchestration.core.errors import BadSignature
from orchestration.core.webhook import BearerWebhooks


class BearerVerifier:
    """Checks deliveries against the secrets in the scheme's environment variable; raises Misconfigured when it is not set."""

    def __init__(self, scheme: BearerWebhooks, environ: Mapping[str, str]) -> None:
        self._secrets = secrets_in(environ, scheme.secret_env)
        self._id_header = scheme.id_header.lower()

    def prove(self, delivery: Delivery) -> None:
        """Raises BadSignature: the header is missing or has another secret."""
        kind, _, token = delivery.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not token.strip():
            raise BadSignature("Authorization: Bearer and the shared secret is needed")
        require_one_of(self._secrets, [token.strip().encode("utf-8", "replace")])

    def meaning(self, delivery: Delivery, json: Any, form: Mapping[str, str]) -> Meaning:
        """The delivery's id is what the scheme's header says, if it says something."""
        return Meaning(delivery.headers.get(self._id_header) or None)
