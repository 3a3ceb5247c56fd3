"""A service of your own sends signed JSON. It signs with any Standard Webhooks library and the secret in `SHOP_SECRET`.

    from standardwebhooks import Webhook
    signature = Webhook(os.environ["SHOP_SECRET"]).sign("msg_17", now, body)

and POSTs `body` to `/v1/webhooks/orders` with the headers `webhook-id: msg_17`, `webhook-timestamp` and `webhook-signature`.
"""

from __future__ import annotations

import os
from typing import Any

from orchestration import Agent, OpenAIChatModel, StandardWebhooks, Webhook, WebhookRequest

clerk = Agent(
    "clerk",
    OpenAIChatModel(os.environ.get("TURNMILL_DEMO_MODEL", "gpt-4o-mini"), api_key_env="OPENAI_API_KEY"),
    system="You look after orders that something went wrong with.",
)


def to_turn(request: WebhookRequest) -> dict[str, Any] | None:
    """A turn for each order that failed; other events mean none."""
    event = request.json
    if event["type"] != "order.failed":
        return None
    return {
        "conversation_id": event["order"],
        "input": f"Order {event['order']} failed: {event['why']}",
        "metadata": {"order": event["order"]},
    }


orders = Webhook("orders", agent="clerk", scheme=StandardWebhooks("SHOP_SECRET"), principal="orders", tenant="shop", to_turn=to_turn)
