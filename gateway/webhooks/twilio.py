"""Twilio's signature scheme: `X-Twilio-Signature` over the URL that Twilio called and the sorted fields of the form.

Rules: https://www.twilio.com/docs/usage/security. A request with a JSON body has its hash in the URL (`bodySHA256`) instead.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from gateway.webhooks.contents import form_pairs, is_form
from gateway.webhooks.delivery import Delivery, Meaning, Reply, require_one_of, secrets_in
from orchestration.core.errors import BadRequest, BadSignature
from orchestration.core.webhook import TwilioWebhooks

_PORTS = {"https": 443, "http": 80}

#: By the name in `X-Twilio-Webhooks-Signature-Settings`; without that header it is the first.
_ALGORITHMS = {"HMAC_SHA1": hashlib.sha1, "HMAC_SHA256": hashlib.sha256}


class TwilioVerifier:
    """Checks deliveries against the auth tokens in the scheme's environment variable; raises Misconfigured when it is not set."""

    def __init__(self, scheme: TwilioWebhooks, environ: Mapping[str, str]) -> None:
        self._secrets = secrets_in(environ, scheme.secret_env)

    def prove(self, delivery: Delivery) -> None:
        """Raises BadSignature: the header is missing, or fits none of the URLs that Twilio may have called."""
        given = delivery.headers.get("x-twilio-signature", "")
        if not given:
            raise BadSignature("X-Twilio-Signature is needed")
        fields = _signed_fields(delivery)
        algorithm = _ALGORITHMS.get(_algorithm_name(delivery.headers.get("x-twilio-webhooks-signature-settings", "")))
        if algorithm is None:
            raise BadSignature("the algorithm in X-Twilio-Webhooks-Signature-Settings is not known here")
        expected = [
            base64.b64encode(hmac.new(secret, (url + fields).encode("utf-8", "replace"), algorithm).digest())
            for secret in self._secrets
            for url in _spellings(delivery.urls)
        ]
        require_one_of(expected, [given.encode("utf-8", "replace")])

    def meaning(self, delivery: Delivery, json: Any, form: Mapping[str, str]) -> Meaning:
        """A message's id is its `MessageSid`, with its status in reports about it; other requests have Twilio's idempotency token."""
        id_ = form.get("MessageSid") or form.get("SmsSid", "")
        if id_ and form.get("MessageStatus"):
            id_ = f"{id_}.{form['MessageStatus']}"
        if not id_:
            id_ = delivery.headers.get("i-twilio-idempotency-token") or delivery.digest()
        return Meaning(id_, Reply.TWIML)


def _algorithm_name(settings: str) -> str:
    named = [value.strip() for name, _, value in (part.partition("=") for part in settings.split(",")) if name.strip() == "algorithm"]
    return named[0].upper() if named else "HMAC_SHA1"


def _signed_fields(delivery: Delivery) -> str:
    if not is_form(delivery):
        if not delivery.body:
            return ""
        # The body is proven by the hash of it in the URL, which the signature is over.
        queries = [urlsplit(url).query for url in delivery.urls[:1]]
        named = [value for query in queries for name, value in parse_qsl(query) if name == "bodySHA256"]
        if not any(hmac.compare_digest(value.lower().encode("utf-8", "replace"), delivery.digest().encode()) for value in named):
            raise BadSignature("bodySHA256 in the URL is not the hash of the body")
        return ""
    try:
        pairs = form_pairs(delivery.body)
    except BadRequest as error:
        raise BadSignature(str(error)) from None
    # Twilio signs a value that a field has twice once.
    return "".join(name + value for name, value in sorted(set(pairs)))


def _spellings(urls: Iterable[str]) -> list[str]:
    """Each URL with and without its scheme's usual port: Twilio's services differ in what they sign."""
    spelled: dict[str, None] = {}
    for url in urls:
        parts = urlsplit(url)
        usual = f":{_PORTS.get(parts.scheme, 80)}"
        bare = parts.netloc.removesuffix(usual)
        spelled |= dict.fromkeys((url, urlunsplit(parts._replace(netloc=bare))))
        if ":" not in bare.rpartition("]")[2]:
            spelled[urlunsplit(parts._replace(netloc=bare + usual))] = None
    return list(spelled)
