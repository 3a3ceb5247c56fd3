"""Text messages over Twilio: a message in becomes a turn, the answer goes back as a message. One conversation a phone number.

In Twilio's console the number's messaging webhook is `https://…/v1/webhooks/sms` (POST). `TWILIO_AUTH_TOKEN` holds the account's auth
token, `TWILIO_ACCOUNT_SID` its id. Set `TURNMILL_PUBLIC_URL`: Twilio signs the URL that it called.
"""

from __future__ import annotations

import os
from typing import Any

import httpx

from orchestration import Agent, OpenAIChatModel, TwilioWebhooks, Webhook, WebhookAnswer, WebhookRequest

#: Characters that fit into ten parts of a text message.
MAX_CHARS = 1600

assistant = Agent(
    "assistant",
    OpenAIChatModel(os.environ.get("TURNMILL_DEMO_MODEL", "gpt-4o-mini"), api_key_env="OPENAI_API_KEY"),
    system="You answer text messages. Two sentences at most.",
)


def to_turn(request: WebhookRequest) -> dict[str, Any] | None:
    """A turn for each message with text. Who writes again before the answer came is answered once, to both."""
    form = request.form
    if not form.get("Body"):
        return None
    return {
        "conversation_id": form["From"],
        "input": form["Body"],
        "metadata": {"to": form["From"], "from": form["To"]},
        "on_busy": "steer",
    }


def send(answer: WebhookAnswer) -> None:
    """Send the answer as a text message; raising has it tried again later."""
    text = answer.answer or "Sorry, we could not answer. Please try again."
    account = os.environ["TWILIO_ACCOUNT_SID"]
    url = os.environ.get("TWILIO_API_URL", "https://api.twilio.com") + f"/2010-04-01/Accounts/{account}/Messages.json"
    form = {"To": answer.metadata["to"], "From": answer.metadata["from"], "Body": text[:MAX_CHARS]}
    httpx.post(url, data=form, auth=(account, os.environ["TWILIO_AUTH_TOKEN"].split()[0]), timeout=20).raise_for_status()


sms = Webhook(
    "sms",
    agent="assistant",
    scheme=TwilioWebhooks("TWILIO_AUTH_TOKEN"),
    principal="sms",
    tenant="shop",
    to_turn=to_turn,
    on_answer=send,
)
