"""What a user declares of a webhook: how its sender proves itself, which agent answers, what a request means, how an answer goes back.

Plain values, checked when they are made. The signatures are checked by `gateway/webhooks/`; `on_answer` is called by a worker.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestration.core.errors import Misconfigured
from orchestration.core.ids import is_id


@dataclass(frozen=True, slots=True)
class StandardWebhooks:
    """The Standard Webhooks signature scheme (standardwebhooks.com), and a good choice for a sender of your own.

    `secret_env` names the environment variable with the `whsec_…` secret. Here and in all schemes several secrets, space-separated in the
    variable, are all valid, so that a secret can be changed without losing a delivery.
    """

    secret_env: str


@dataclass(frozen=True, slots=True)
class GitHubWebhooks:
    """GitHub's `X-Hub-Signature-256`. A `ping` is answered and means no turn; the delivery's id is `X-GitHub-Delivery`."""

    secret_env: str


@dataclass(frozen=True, slots=True)
class SlackWebhooks:
    """Slack's v0 signature: events, slash commands and interactions. `url_verification` is answered here."""

    secret_env: str


@dataclass(frozen=True, slots=True)
class TwilioWebhooks:
    """Twilio's `X-Twilio-Signature` over the URL and the form; `secret_env` names the variable with the auth token.

    The URL is the one that Twilio called: `TURNMILL_PUBLIC_URL` where that is set, else what a trusted proxy forwards, else the request's
    own. The scheme has no time in it: a delivery id that is a day old could be replayed by whoever recorded the request.
    """

    secret_env: str


@dataclass(frozen=True, slots=True)
class StripeWebhooks:
    """The scheme of Stripe, which others copied: `t=…,v1=…` in one header, over the time and the body.

    `header` is the name of that header, `id_field` the member of the JSON body that is the delivery's id.
    """

    secret_env: str
    header: str = "Stripe-Signature"
    id_field: str = "id"


@dataclass(frozen=True, slots=True)
class BearerWebhooks:
    """A shared secret as `Authorization: Bearer …`, for senders that sign nothing. Whoever reads one request can send others.

    `id_header` names the header with the delivery's id; without it a repeated delivery is another turn.
    """

    secret_env: str
    id_header: str = "Idempotency-Key"


#: The schemes that the gateway can check.
Scheme = StandardWebhooks | GitHubWebhooks | SlackWebhooks | TwilioWebhooks | StripeWebhooks | BearerWebhooks


@dataclass(frozen=True, slots=True)
class WebhookRequest:
    """A verified request, as `to_turn` sees it.

    `json` is the parsed body, or for a form the JSON in its field `payload`; None where there is none. `form` are the fields of a form body
    (the last value of each); `headers` have lower-case names.
    """

    json: Any
    body: bytes
    headers: Mapping[str, str]
    query: Mapping[str, str]
    form: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WebhookAnswer:
    """How a webhook's turn ended, as `on_answer` gets it.

    `answer` is empty where the turn ended without one; `stop_reason` says why, `error` (`code`, `detail`) what failed. `metadata` is what
    `to_turn` gave. `delivery_id` is the same in every try: give it to a receiver that can tell repetitions.
    """

    webhook: str
    turn_id: str
    conversation_id: str
    agent: str
    state: str
    stop_reason: str
    answer: str
    output: Any
    error: Mapping[str, str] | None
    metadata: Mapping[str, Any]
    delivery_id: str


@dataclass(frozen=True, slots=True)
class Webhook:
    """A door for signed requests at `/v1/webhooks/{name}`: which agent answers, for which principal and tenant, and
    how a request becomes a turn.

    Args:
        to_turn: makes a verified request a dict with `input` and perhaps `conversation_id` (any text: a phone number, a channel), `brief`,
            `metadata`, `callback_url`, `on_busy`; or None for a request that means no turn. The sender waits for it, so it must be quick.
        on_answer: called (or awaited) by a worker when a turn of this webhook has ended, however it ended. Called again, with growing
            pauses for 24 h, while it raises, and perhaps once more when its process dies in the middle.

    Raises:
        Misconfigured: a name that is no id, no scheme, or functions that cannot be called as they must.
    """

    name: str
    agent: str
    scheme: Scheme
    principal: str
    tenant: str
    to_turn: Callable[[WebhookRequest], Mapping[str, Any] | None]
    on_answer: Callable[[WebhookAnswer], object] | None = None

    def __post_init__(self) -> None:
        for what, value in (("name", self.name), ("agent", self.agent), ("tenant", self.tenant)):
            if not is_id(value):
                raise Misconfigured(f"Webhook({self.name!r}): {what} {value!r} is 1 to 64 characters of A-Z a-z 0-9 _ -")
        if not self.principal or len(self.principal) > 200:
            raise Misconfigured(f"Webhook({self.name!r}): principal is 1 to 200 characters")
        if not isinstance(self.scheme, Scheme):
            raise Misconfigured(f"Webhook({self.name!r}): {type(self.scheme).__name__} is no signature scheme of Turnmill")
        if not callable(self.to_turn) or inspect.iscoroutinefunction(self.to_turn):
            raise Misconfigured(f"Webhook({self.name!r}): to_turn is a plain function of one request, not an async one")
        if self.on_answer is not None and not callable(self.on_answer):
            raise Misconfigured(f"Webhook({self.name!r}): on_answer is a function of one answer")
