"""The shop's agent and its webhook: all that a user declares. Name it in `TURNMILL_AGENTS=examples.shop.agents`."""

from __future__ import annotations

import os

from orchestration import Agent, OpenAIChatModel, StandardWebhooks, Webhook, discover

model = OpenAIChatModel(
    os.environ.get("TURNMILL_DEMO_MODEL", "demo"),
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8089/v1"),
    api_key_env="OPENAI_API_KEY",
)

support = Agent(
    "support",
    model,
    tools=[discover("math/*", "billing/*")],
    system="You help customers of a shop. Use the tools for sums and refunds, never your own arithmetic, and ask for all of them at once.",
    description="orders and refunds",
)

shop = Webhook(
    "shop",
    agent="support",
    scheme=StandardWebhooks(secret_env="SHOP_SECRET"),
    principal="shop",
    tenant="dev",
    to_turn=lambda request: {"conversation_id": request.json["customer"], "input": request.json["text"]},
)
