"""Somebody mentions the bot in Slack; the agent answers in the thread.

The Slack app needs the event `app_mention`, sent to `https://…/v1/webhooks/slack`, and the scope `chat:write`. Its signing secret goes into
`SLACK_SIGNING_SECRET`, its bot token into `SLACK_BOT_TOKEN`. Slack's `url_verification` is answered by the gateway.
"""

from __future__ import annotations

import os
import re
from typing import Any

import httpx

from orchestration import Agent, OpenAIChatModel, SlackWebhooks, Webhook, WebhookAnswer, WebhookRequest

helper = Agent(
    "helper",
    OpenAIChatModel(os.environ.get("TURNMILL_DEMO_MODEL", "gpt-4o-mini"), api_key_env="OPENAI_API_KEY"),
    system="You answer colleagues in a Slack thread, in a few sentences.",
)


def to_turn(request: WebhookRequest) -> dict[str, Any] | None:
    """A turn for each mention by a human, one conversation a thread."""
    event = (request.json or {}).get("event", {})
    if event.get("type") != "app_mention" or event.get("bot_id"):
        return None
    thread = event.get("thread_ts", event["ts"])
    return {
        "conversation_id": f"{event['channel']}:{thread}",
        "input": re.sub(r"<@\w+>\s*", "", event["text"]) or "Hello",
        "metadata": {"channel": event["channel"], "thread": thread},
    }


def reply(answer: WebhookAnswer) -> None:
    """Answer in the thread; raising has it tried again later."""
    text = answer.answer or "Sorry, that went wrong. Please ask again."
    url = os.environ.get("SLACK_API_URL", "https://slack.com/api") + "/chat.postMessage"
    body = {"channel": answer.metadata["channel"], "thread_ts": answer.metadata["thread"], "text": text}
    sent = httpx.post(url, json=body, headers={"Authorization": f"Bearer {os.environ['SLACK_BOT_TOKEN']}"}, timeout=20)
    sent.raise_for_status()
    if not sent.json().get("ok"):  # Slack says so with a 200
        raise RuntimeError(f"Slack refused the message: {sent.json().get('error')}")


slack = Webhook(
    "slack",
    agent="helper",
    scheme=SlackWebhooks("SLACK_SIGNING_SECRET"),
    principal="slack",
    tenant="shop",
    to_turn=to_turn,
    on_answer=reply,
)
