"""Signatures of calls to the outside, in the form of Standard Webhooks, and the secrets that they are made with."""

from __future__ import annotations

import base64
from datetime import UTC, datetime

from standardwebhooks import Webhook

from orchestration.settings import Settings
from orchestration.state.secrets import Secrets


def secrets_of(tenant: str, settings: Settings, kept: Secrets) -> list[str]:
    """The `whsec_…` secrets that sign calls for a tenant: those of the settings, else one that the tenant has for itself.

    Each tenant's is another one: who receives calls of one tenant must not be able to make those of another.
    """
    configured = settings.callback_secret.get_secret_value().split()
    if configured:
        return configured
    return ["whsec_" + base64.b64encode(bytes.fromhex(kept.get(f"callback:{tenant}"))).decode()]


def signed_headers(secrets: list[str], message_id: str, body: str, *, now_s: int) -> dict[str, str]:
    """The headers that prove who sent `body`; one signature for each secret."""
    sent_at = datetime.fromtimestamp(now_s, UTC)
    signatures = [Webhook(secret).sign(message_id, sent_at, body) for secret in secrets]
    return {"webhook-id": message_id, "webhook-timestamp": str(now_s), "webhook-signature": " ".join(signatures)}
