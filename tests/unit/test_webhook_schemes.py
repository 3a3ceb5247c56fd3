"""Each signature scheme of webhooks in: what the sender's own library signs is taken, and nothing else."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

import pytest
from slack_sdk.signature import Clock, SignatureVerifier
from standardwebhooks.webhooks import Webhook as StandardSigner
from stripe import WebhookSignature
from twilio.request_validator import RequestValidator

from gateway.webhooks.bearer import BearerVerifier
from gateway.webhooks.contents import contents
from gateway.webhooks.delivery import Delivery, Meaning, Reply, Verifier
from gateway.webhooks.github import GitHubVerifier
from gateway.webhooks.slack import SlackVerifier
from gateway.webhooks.standard import StandardVerifier
from gateway.webhooks.stripe import StripeVerifier
from gateway.webhooks.twilio import TwilioVerifier
from orchestration.core.errors import BadRequest, BadSignature, Misconfigured
from orchestration.core.webhook import (
    BearerWebhooks,
    GitHubWebhooks,
    SlackWebhooks,
    StandardWebhooks,
    StripeWebhooks,
    TwilioWebhooks,
)

NOW = 1_700_000_000
URL = "https://hooks.example.com/v1/webhooks/sms?team=a%20b"
FORM = "application/x-www-form-urlencoded"


def whsec(secret: str) -> str:
    return "whsec_" + base64.b64encode(secret.encode()).decode()


def standard(secret: str, body: bytes, at: int, id_: str = "msg_1") -> dict[str, str]:
    signature = StandardSigner(whsec(secret)).sign(id_, datetime.fromtimestamp(at, UTC), body.decode())
    return {"webhook-id": id_, "webhook-timestamp": str(at), "webhook-signature": signature}


def github(secret: str, body: bytes, _at: int) -> dict[str, str]:
    return {"x-hub-signature-256": "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest(), "x-github-delivery": "d-1"}


def slack(secret: str, body: bytes, at: int) -> dict[str, str]:
    signature = SignatureVerifier(secret).generate_signature(timestamp=str(at), body=body)
    return {"x-slack-request-timestamp": str(at), "x-slack-signature": str(signature)}


def twilio(secret: str, body: bytes, _at: int) -> dict[str, str]:
    fields = dict(pair.split("=") for pair in body.decode().split("&")) if body else {}
    return {"x-twilio-signature": RequestValidator(secret).compute_signature(URL, fields), "content-type": FORM}


def stripe(secret: str, body: bytes, at: int) -> dict[str, str]:
    return {"stripe-signature": WebhookSignature.generate_signature_header(body.decode(), secret, timestamp=at)}


def bearer(secret: str, _body: bytes, _at: int) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


@dataclass(frozen=True)
class Kind:
    """One scheme: how its sender signs, how we check, and what its secret looks like in the environment."""

    sign: Callable[..., dict[str, str]]
    make: Callable[[dict[str, str]], Verifier]
    in_env: Callable[[str], str] = str
    timed: bool = False


def clock() -> float:
    return NOW


KINDS = {
    "standard": Kind(standard, lambda env: StandardVerifier(StandardWebhooks("S"), env, clock), whsec, timed=True),
    "github": Kind(github, lambda env: GitHubVerifier(GitHubWebhooks("S"), env)),
    "slack": Kind(slack, lambda env: SlackVerifier(SlackWebhooks("S"), env, clock), timed=True),
    "twilio": Kind(twilio, lambda env: TwilioVerifier(TwilioWebhooks("S"), env)),
    "stripe": Kind(stripe, lambda env: StripeVerifier(StripeWebhooks("S"), env, clock), timed=True),
    "bearer": Kind(bearer, lambda env: BearerVerifier(BearerWebhooks("S"), env)),
}

BODIES = {"twilio": b"Body=hi&From=you"}


def body_of(name: str) -> bytes:
    return BODIES.get(name, '{ "n":1.0,\n "t":"caf\\u00e9 é" }'.encode())


def deliver(name: str, *secrets: str, signed_with: str, at: int = NOW, body: bytes | None = None) -> None:
    kind, raw = KINDS[name], body_of(name)
    verifier = kind.make({"S": " ".join(kind.in_env(secret) for secret in secrets)})
    verifier.prove(Delivery(kind.sign(signed_with, raw, at), raw if body is None else body, (URL,)))


@pytest.mark.parametrize("name", KINDS)
def test_what_the_senders_library_signs_is_taken(name: str) -> None:
    deliver(name, "a-secret-of-ours", signed_with="a-secret-of-ours")


@pytest.mark.parametrize("name", KINDS)
def test_while_a_secret_is_changed_the_old_and_the_new_one_hold(name: str) -> None:
    for used in ("the-old-secret", "the-new-secret"):
        deliver(name, "the-old-secret", "the-new-secret", signed_with=used)
    with pytest.raises(BadSignature):
        deliver(name, "the-new-secret", signed_with="the-old-secret")


@pytest.mark.parametrize("name", [name for name in KINDS if name != "bearer"])
def test_another_body_than_the_signed_one_is_refused(name: str) -> None:
    with pytest.raises(BadSignature):
        deliver(name, "a-secret-of-ours", signed_with="a-secret-of-ours", body=body_of(name) + b" ")


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.timed])
def test_a_time_may_be_five_minutes_off_and_no_more(name: str) -> None:
    for age_s in (299, 300, -299):
        deliver(name, "a-secret-of-ours", signed_with="a-secret-of-ours", at=NOW - age_s)
    for age_s in (301, -301, 10_000_000):
        with pytest.raises(BadSignature):
            deliver(name, "a-secret-of-ours", signed_with="a-secret-of-ours", at=NOW - age_s)


@pytest.mark.parametrize("name", KINDS)
def test_a_request_without_its_headers_is_refused(name: str) -> None:
    verifier = KINDS[name].make({"S": KINDS[name].in_env("a-secret-of-ours")})
    headers = KINDS[name].sign("a-secret-of-ours", body_of(name), NOW)
    for left_out in [name for name in headers if name not in ("content-type", "x-github-delivery")]:
        for rest in ({key: value for key, value in headers.items() if key != left_out}, {**headers, left_out: ""}):
            with pytest.raises(BadSignature):
                verifier.prove(Delivery(rest, body_of(name), (URL,)))


@pytest.mark.parametrize("name", KINDS)
def test_a_signature_of_any_characters_is_only_a_wrong_one(name: str) -> None:
    verifier = KINDS[name].make({"S": KINDS[name].in_env("a-secret-of-ours")})
    headers = KINDS[name].sign("a-secret-of-ours", body_of(name), NOW)
    for changed in [name for name in headers if name not in ("content-type", "x-github-delivery", "webhook-id")]:
        for wrong in ("é\x00\xff", "=,=,=", "v1,", "t=,v1=", "9" * 500, "Bearer \ud800", "sha256=\u0661"):
            with pytest.raises(BadSignature):
                verifier.prove(Delivery({**headers, changed: wrong}, body_of(name), (URL,)))


@pytest.mark.parametrize("name", KINDS)
def test_a_secret_that_is_not_set_is_refused_at_start(name: str) -> None:
    for environ in ({}, {"S": ""}, {"S": "  "}):
        with pytest.raises(Misconfigured, match="S"):
            KINDS[name].make(environ)


def test_a_standard_secret_that_is_no_base64_is_refused_at_start() -> None:
    for secret in ("whsec_%%%", "whsec_", "whsec_====", "whsec_a"):
        with pytest.raises(Misconfigured, match="S"):
            KINDS["standard"].make({"S": secret})


# The providers' own vectors


def test_githubs_signature_is_over_the_bytes_as_sent() -> None:
    body = b'{ "action":"opened",\n  "n": 1.0, "t":"caf\\u00e9 \xc3\xa9" }'
    signature = "sha256=0675616b33f78db51218cb7bbda183fcb7397a38b14e4c57a3c1251089fe08f2"
    verifier = GitHubVerifier(GitHubWebhooks("S"), {"S": "gh-secret"})
    verifier.prove(Delivery({"x-hub-signature-256": signature}, body))
    digest = signature.removeprefix("sha256=")
    for headers in (
        {},
        {"x-hub-signature-256": "sha256=" + "0" * 64},
        {"x-hub-signature-256": "sha256="},
        {"x-hub-signature-256": digest},
        {"x-hub-signature-256": "sha256=" + digest.upper()},
        {"x-hub-signature": "sha1=" + hmac.new(b"gh-secret", body, hashlib.sha1).hexdigest()},
    ):
        with pytest.raises(BadSignature):
            verifier.prove(Delivery(headers, body))


def test_one_of_several_standard_signatures_is_enough() -> None:
    secret = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="
    headers = {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(NOW),
        "webhook-signature": "v1,AAAA v2,zzz v1,ulv8j9V682ekQD7f5pyj9nPiSzsn1HRl5k+V4gVDxnQ=",
    }
    StandardVerifier(StandardWebhooks("S"), {"S": secret}, clock).prove(Delivery(headers, b'{"type":"ping","data":{}}'))


def test_one_of_several_stripe_signatures_is_enough() -> None:
    body, wrong = b'{"id":"evt_1","type":"charge.succeeded"}', "0" * 64
    right = "e9eedb8730cc42528874ed18a63364e78418de1259fcc0511b24f3b29dc8327e"
    verifier = StripeVerifier(StripeWebhooks("S"), {"S": "st-secret"}, clock)
    for header in (f"t={NOW},v1={wrong},v1={right},v0=abc", f"t={NOW},v1={right},v1={wrong},v0=abc"):
        verifier.prove(Delivery({"stripe-signature": header}, body))
    for header in (f"t={NOW},v0={right}", f"t={NOW},v1={wrong}", f"v1={right}", f"t={NOW},t={NOW + 1},v1={right}", f"t={NOW}"):
        with pytest.raises(BadSignature):
            verifier.prove(Delivery({"stripe-signature": header}, body))


def test_a_stripe_like_scheme_may_have_another_header_and_id() -> None:
    verifier = StripeVerifier(StripeWebhooks("S", header="X-Shop-Signature", id_field="event"), {"S": "st-secret"}, clock)
    body = b'{"event": 77}'
    delivery = Delivery({"x-shop-signature": stripe("st-secret", body, NOW)["stripe-signature"]}, body)
    verifier.prove(delivery)
    assert verifier.meaning(delivery, json.loads(body), {}) == Meaning("77")


def test_slacks_library_agrees_about_old_requests() -> None:
    body = b"token=x&command=%2Fask"

    class At(Clock):
        def now(self) -> float:
            return float(NOW)

    for age_s in (299, 301):
        headers = slack("sl-secret", body, NOW - age_s)
        theirs = SignatureVerifier("sl-secret", At()).is_valid_request(body, headers)
        try:
            SlackVerifier(SlackWebhooks("S"), {"S": "sl-secret"}, clock).prove(Delivery(headers, body))
            ours = True
        except BadSignature:
            ours = False
        assert ours is theirs is (age_s == 299)


def slack_meaning(body: bytes, **headers: str) -> Meaning:
    verifier = SlackVerifier(SlackWebhooks("S"), {"S": "sl-secret"}, clock)
    delivery = Delivery({**slack("sl-secret", body, NOW), **headers}, body)
    verifier.prove(delivery)
    return verifier.meaning(delivery, *contents(delivery))


def test_slacks_handshake_is_answered_and_means_no_turn() -> None:
    body = b'{"token":"x","challenge":"c-123","type":"url_verification"}'
    signature = "v0=c0d7fd9d4fba7d1d8cf722bb6a472c6e7a8b7d492420a3896714ea4b3c946a14"
    assert slack("sl-secret", body, NOW)["x-slack-signature"] == signature
    assert slack_meaning(body).answer == {"challenge": "c-123"}


def test_slack_events_have_ids_and_commands_are_answered_with_nothing() -> None:
    event = b'{"type":"event_callback","event_id":"Ev1","event":{}}'
    assert slack_meaning(event, **{"x-slack-retry-num": "1"}) == Meaning("Ev1", Reply.OK)
    command = slack_meaning(b"token=x&command=%2Fask&text=hi", **{"content-type": FORM})
    assert (command.reply, command.ignored) == (Reply.EMPTY, False)
    assert slack_meaning(b"ssl_check=1&token=x", **{"content-type": FORM}).ignored
    with pytest.raises(BadRequest):
        slack_meaning(b"[1]")


# Twilio's URL


SMS = {"MessageSid": "SM1", "From": "+15550001", "To": "+15550002", "Body": "héllo + you", "NumMedia": "0", "MediaUrl0": ""}


def twilio_delivery(urls: tuple[str, ...], signature: str, fields: Any = None) -> Delivery:
    body = urlencode(SMS if fields is None else fields).encode()
    return Delivery({"x-twilio-signature": signature, "content-type": FORM + "; charset=UTF-8"}, body, urls)


def test_twilios_signature_is_over_the_public_url_and_the_fields_empty_ones_too() -> None:
    verifier = TwilioVerifier(TwilioWebhooks("S"), {"S": "tw-token"})
    signature = "Jhrz9wS4Hg2ax9WqJJzGqfH50LU="
    assert RequestValidator("tw-token").compute_signature(URL, SMS) == signature
    verifier.prove(twilio_delivery((URL,), signature))
    verifier.prove(twilio_delivery(("http://10.0.0.7:8000/v1/webhooks/sms?team=a%20b", URL), signature))
    for urls in ((), (URL.replace("https", "http"),), (URL.replace("%20", "+"),), (URL + "#x",)):
        with pytest.raises(BadSignature):
            verifier.prove(twilio_delivery(urls, signature))


def test_twilio_may_sign_the_port_or_leave_it_out() -> None:
    verifier = TwilioVerifier(TwilioWebhooks("S"), {"S": "tw-token"})
    theirs = RequestValidator("tw-token")
    for signed_url, our_url in (
        ("https://h.example:443/x", "https://h.example/x"),
        ("https://h.example/x", "https://h.example:443/x"),
        ("http://h.example:80/x", "http://h.example/x"),
        ("https://[2001:db8::1]:443/x", "https://[2001:db8::1]/x"),
        ("https://h.example:8443/x", "https://h.example:8443/x"),
    ):
        verifier.prove(twilio_delivery((our_url,), theirs.compute_signature(signed_url, SMS)))


def test_a_field_that_comes_twice_and_a_newer_algorithm_are_signed_as_twilio_does() -> None:
    class Fields(dict[str, Any]):
        def getlist(self, name: str) -> list[str]:
            return [value for key, value in pairs if key == name]

    pairs = [("b", "2"), ("b", "1"), ("b", "2"), ("a", "x")]
    verifier, theirs = TwilioVerifier(TwilioWebhooks("S"), {"S": "tw-token"}), RequestValidator("tw-token")
    verifier.prove(twilio_delivery((URL,), theirs.compute_signature(URL, Fields(pairs)), pairs))
    newer = twilio_delivery((URL,), theirs.compute_signature(URL, SMS, "HMAC_SHA256"))
    with pytest.raises(BadSignature):
        verifier.prove(newer)
    settings = {"x-twilio-webhooks-signature-settings": "key=webhooks_sharedkey_1,algorithm=HMAC_SHA256"}
    verifier.prove(Delivery({**newer.headers, **settings}, newer.body, newer.urls))
    with pytest.raises(BadSignature):
        verifier.prove(Delivery({**newer.headers, "x-twilio-webhooks-signature-settings": "algorithm=NONE"}, newer.body, newer.urls))


def test_a_json_body_of_twilios_is_proven_by_its_hash_in_the_url() -> None:
    verifier, theirs = TwilioVerifier(TwilioWebhooks("S"), {"S": "tw-token"}), RequestValidator("tw-token")
    body = b'{"a": 1}'
    url = f"https://h.example/x?bodySHA256={hashlib.sha256(body).hexdigest()}"
    signature = theirs.compute_signature(url, {})
    assert theirs.validate(url, body.decode(), signature)
    verifier.prove(Delivery({"x-twilio-signature": signature, "content-type": "application/json"}, body, (url,)))
    for other in (Delivery({"x-twilio-signature": signature}, b'{"a": 2}', (url,)), Delivery({"x-twilio-signature": signature}, body, ())):
        with pytest.raises(BadSignature):
            verifier.prove(other)


def test_twilios_ids_tell_messages_and_reports_about_them_apart() -> None:
    verifier = TwilioVerifier(TwilioWebhooks("S"), {"S": "tw-token"})

    def id_of(form: dict[str, str], **headers: str) -> str | None:
        found = verifier.meaning(Delivery({key.replace("_", "-"): value for key, value in headers.items()}, b"x"), None, form)
        assert found.reply is Reply.TWIML
        return found.id

    assert id_of(SMS) == "SM1"
    assert id_of({**SMS, "MessageStatus": "delivered"}) == "SM1.delivered"
    assert id_of({"CallSid": "CA1"}, i_twilio_idempotency_token="t-1") == "t-1"
    assert id_of({"CallSid": "CA1"}) == hashlib.sha256(b"x").hexdigest()


def test_a_bearers_delivery_has_the_id_that_its_header_says() -> None:
    verifier = BearerVerifier(BearerWebhooks("S", id_header="X-Delivery"), {"S": "a-secret-of-ours"})
    assert verifier.meaning(Delivery({"x-delivery": "7"}, b"{}"), {}, {}).id == "7"
    assert verifier.meaning(Delivery({}, b"{}"), {}, {}).id is None
    verifier.prove(Delivery({"authorization": "bearer  a-secret-of-ours "}, b""))


# Bodies


def test_a_body_is_read_as_what_it_says_it_is() -> None:
    assert contents(Delivery({}, b"")) == (None, {})
    assert contents(Delivery({}, b'{"a": 1}')) == ({"a": 1}, {})
    assert contents(Delivery({"content-type": "application/vnd.github+json"}, b"[1]")) == ([1], {})
    assert contents(Delivery({"content-type": "text/plain"}, b"not json")) == (None, {})
    assert contents(Delivery({"content-type": FORM}, b"a=1&b=&a=2&c=%C3%A9")) == (None, {"a": "2", "b": "", "c": "é"})
    assert contents(Delivery({"content-type": FORM}, b"payload=%7B%22a%22%3A1%7D")) == ({"a": 1}, {"payload": '{"a":1}'})
    for broken in (
        Delivery({}, b"\xff"),
        Delivery({}, b"{"),
        Delivery({}, b"NaN"),
        Delivery({"content-type": FORM}, b"a=%FF"),
        Delivery({"content-type": FORM}, b"a=\xff"),
        Delivery({"content-type": FORM}, b"&".join(b"a=1" for _ in range(1001))),
        Delivery({"content-type": FORM}, b"payload=%7B"),
    ):
        with pytest.raises(BadRequest):
            contents(broken)
