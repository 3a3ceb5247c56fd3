"""Tokens that others issue (JWT): which hold, which do not, and what their claims become. Keys are made here; no server is asked."""

from __future__ import annotations

import base64
import json
import logging
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from pydantic import SecretStr

from orchestration.core.errors import Misconfigured, Unauthorized
from orchestration.identity import key_set
from orchestration.identity.key_set import KeySet
from orchestration.identity.tokens import TokenVerifier
from orchestration.settings import Settings

NOW = 1_800_000_000
SECRET = "a-secret-that-is-long-enough-for-every-algorithm-of-this-family-and-more"
RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER_RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
CLAIMS = {"sub": "ann", "tenant": "acme", "roles": ["ops"], "scope": "turns:read turns:write other:thing", "exp": NOW + 60}


def jwk(key: Any, kid: str | None = "k1", **more: Any) -> dict[str, Any]:
    algorithm = jwt.algorithms.RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else jwt.algorithms.ECAlgorithm
    made = dict(algorithm.to_jwk(key.public_key(), as_dict=True)) | more
    return made if kid is None else made | {"kid": kid}


def keys_file(directory: Path, *keys: dict[str, Any]) -> str:
    path = directory / "jwks.json"
    path.write_text(json.dumps({"keys": list(keys)}), encoding="utf-8")
    return str(path)


def verifier(**settings: Any) -> TokenVerifier:
    if "jwt_secret" in settings:
        settings["jwt_secret"] = SecretStr(settings["jwt_secret"])
    return TokenVerifier(Settings(**settings), now=lambda: NOW)


def token(key: Any = SECRET, algorithm: str = "HS256", headers: dict[str, Any] | None = None, **claims: Any) -> str:
    merged = {name: value for name, value in (CLAIMS | claims).items() if value is not None}
    return jwt.encode(merged, key, algorithm=algorithm, headers=headers)


def part(data: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(data).encode()).rstrip(b"=").decode()


def refused(found: TokenVerifier, text: str) -> str:
    with pytest.raises(Unauthorized) as caught:
        found.identify(text)
    assert text not in str(caught.value)
    return str(caught.value)


def test_a_token_becomes_its_principal() -> None:
    found = verifier(jwt_secret=SECRET).identify(token())
    assert found is not None
    assert (found.principal.sub, found.principal.tenant, found.principal.roles) == ("ann", "acme", ("ops",))
    assert found.principal.scopes == ("turns:read", "turns:write")
    assert found.expires_at == NOW + 60


def test_scopes_may_be_a_list_and_the_role_for_all_roles_is_not_given_away() -> None:
    found = verifier(jwt_secret=SECRET).identify(token(scope=None, scopes=["turns:read"], roles=["*", "ops"]))
    assert found is not None
    assert (found.principal.scopes, found.principal.roles) == (("turns:read",), ("ops",))


def test_without_a_setting_no_token_is_one() -> None:
    assert not verifier()
    assert verifier().identify(token()) is None


def test_what_is_no_token_at_all_is_left_to_others() -> None:
    for text in ("tmk_key", "a.b", "", "a.b.c.d"):
        assert verifier(jwt_secret=SECRET).identify(text) is None


@pytest.mark.parametrize(
    "claims",
    [
        {"exp": NOW},
        {"exp": NOW - 1},
        {"exp": None},
        {"exp": "soon"},
        {"exp": True},
        {"exp": 1e300},
        {"nbf": NOW + 60},
        {"nbf": "later"},
        {"sub": None},
        {"sub": ""},
        {"sub": "x" * 201},
        {"sub": "\ud800"},
        {"sub": "a\r\nX: y"},
        {"tenant": None},
        {"tenant": "a b"},
        {"tenant": ["acme"]},
        {"roles": "ops"},
        {"roles": [{"a": 1}]},
        {"roles": ["\udfff"]},
        {"scope": {"a": 1}},
        {"aud": "somebody-else"},
    ],
)
def test_a_token_whose_claims_do_not_hold_is_refused(claims: dict[str, Any]) -> None:
    refused(verifier(jwt_secret=SECRET), token(**claims))


def test_an_issuers_clock_may_be_a_little_ahead() -> None:
    assert verifier(jwt_secret=SECRET).identify(token(nbf=NOW + 5, iat=NOW + 5)) is not None


def test_issuer_and_audience_are_checked_where_they_are_set() -> None:
    found = verifier(jwt_secret=SECRET, jwt_issuer="https://id.example", jwt_audience="turnmill")
    assert found.identify(token(iss="https://id.example", aud=["web", "turnmill"])) is not None
    for claims in (
        {"iss": "https://id.example"},
        {"aud": "turnmill"},
        {"iss": "https://id.example", "aud": "web"},
        {"iss": "https://id.example", "aud": []},
        {"iss": "https://evil.example", "aud": "turnmill"},
        {"iss": "https://id.example.evil", "aud": "turnmill"},
    ):
        refused(found, token(**claims))


def test_a_token_signed_with_another_secret_or_changed_is_refused() -> None:
    found = verifier(jwt_secret=SECRET)
    refused(found, token("another secret, thirty-two bytes long"))
    head, _, signature = token().split(".")
    refused(found, f"{head}.{part({**CLAIMS, 'tenant': 'rival'})}.{signature}")
    refused(found, f"{head}.{part(CLAIMS)}.")


def test_several_secrets_hold_while_one_is_changed() -> None:
    found = verifier(jwt_secret=f"{SECRET} {SECRET[::-1]}")
    assert found.identify(token()) and found.identify(token(SECRET[::-1]))


@pytest.mark.parametrize("algorithm", ["none", "None", "NONE", "", "HS384", "HS512", "PS256", "EdDSA", "RS512", None, ["HS256"], 7])
def test_a_token_does_not_choose_how_it_is_checked(algorithm: Any, tmp_path: Path) -> None:
    found = verifier(jwt_secret=SECRET, jwt_jwks=keys_file(tmp_path, jwk(RSA_KEY)))
    for signature in ("", token().rpartition(".")[2]):
        refused(found, f"{part({'alg': algorithm, 'typ': 'JWT', 'kid': 'k1'})}.{part(CLAIMS)}.{signature}")
    if algorithm in ("HS384", "HS512"):
        refused(found, token(algorithm=algorithm))


def test_extensions_that_are_not_known_are_refused() -> None:
    refused(verifier(jwt_secret=SECRET), token(headers={"crit": ["exp"], "exp": NOW}))


@pytest.mark.parametrize(
    "text", ["..", "a.b.c", "e30.e30.e30", f"{'x' * 4000}.y.z", "é.ü.ß", f"{part({'alg': 'HS256'})}.bnVsbA.x", "[.].["]
)
def test_what_cannot_be_read_is_refused(text: str) -> None:
    refused(verifier(jwt_secret=SECRET), text)


def test_tokens_are_checked_with_the_key_that_they_name(tmp_path: Path) -> None:
    found = verifier(jwt_jwks=keys_file(tmp_path, jwk(RSA_KEY, "r1"), jwk(EC_KEY, "e1"), jwk(OTHER_RSA_KEY, "r2")))
    assert found.identify(token(RSA_KEY, "RS256", {"kid": "r1"}))
    assert found.identify(token(OTHER_RSA_KEY, "RS256", {"kid": "r2"}))
    assert found.identify(token(EC_KEY, "ES256", {"kid": "e1"}))
    assert found.identify(token(OTHER_RSA_KEY, "RS256"))
    for text in (
        token(OTHER_RSA_KEY, "RS256", {"kid": "r1"}),
        token(RSA_KEY, "RS256", {"kid": "unknown"}),
        token(EC_KEY, "ES256", {"kid": "r1"}),
        token(RSA_KEY, "RS512", {"kid": "r1"}),
        token(SECRET),
    ):
        refused(found, text)


def test_a_public_key_is_no_secret(tmp_path: Path) -> None:
    public = RSA_KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    forged_head = f"{part({'alg': 'HS256', 'kid': 'k1'})}.{part(CLAIMS)}"
    signature = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256).sign(forged_head.encode(), public)
    forged = f"{forged_head}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"
    path = keys_file(tmp_path, jwk(RSA_KEY))
    refused(verifier(jwt_jwks=path), forged)
    refused(verifier(jwt_jwks=path, jwt_secret=SECRET), forged)


def test_a_key_that_a_token_brings_along_counts_for_nothing(tmp_path: Path) -> None:
    found = verifier(jwt_jwks=keys_file(tmp_path, jwk(RSA_KEY)))
    for headers in ({"jwk": jwk(OTHER_RSA_KEY)}, {"kid": "k1", "jku": "https://evil.example/jwks"}, {"kid": "../../k1"}):
        refused(found, token(OTHER_RSA_KEY, "RS256", headers))


def test_keys_that_are_no_public_signing_keys_are_left_out(tmp_path: Path) -> None:
    weak = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    secret = {"kty": "oct", "kid": "s", "k": base64.urlsafe_b64encode(SECRET.encode()).decode()}
    keys = KeySet(
        keys_file(
            tmp_path,
            jwk(RSA_KEY, "good"),
            jwk(RSA_KEY, "encryption", use="enc"),
            jwk(RSA_KEY, "pss", alg="PS256"),
            jwk(RSA_KEY, "signs", key_ops=["sign"]),
            jwk(weak, "weak"),
            jwk(ec.generate_private_key(ec.SECP384R1()), "curve"),
            dict(jwt.algorithms.OKPAlgorithm.to_jwk(ed25519.Ed25519PrivateKey.generate().public_key(), as_dict=True)) | {"kid": "okp"},
            {"kty": "RSA", "kid": "broken", "n": "!", "e": "AQAB"},
            {"kid": "nothing"},
            secret,
        )
    )
    assert [key.id for key in keys.keys(None, "RS256")] == ["good"]
    assert keys.keys(None, "ES256") == []
    assert keys.keys(None, "HS256") == []


def test_a_file_that_holds_no_keys_is_refused_at_start(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    for text in ("", "[]", "{}", '{"keys": []}', '{"keys": 7}', '{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}', "x" * 2_000_000):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(Misconfigured, match="TURNMILL_JWT_JWKS"):
            KeySet(str(path))
    with pytest.raises(Misconfigured, match="TURNMILL_JWT_JWKS"):
        KeySet(str(tmp_path / "none.json"))


@pytest.mark.parametrize("url", ["http://id.example/jwks", "ftp://id.example/x", "file:///etc/passwd", "http://localhost.evil.example/x"])
def test_a_key_set_is_not_fetched_where_others_could_change_it(url: str) -> None:
    with pytest.raises(Misconfigured, match="https"):
        KeySet(url, read=lambda _: b"")


class Source:
    """A key set somewhere else, with a clock that a test turns."""

    def __init__(self, *keys: dict[str, Any]) -> None:
        self.kept = list(keys)
        self.fault: Exception | None = None
        self.read = 0
        self.now = 0.0

    def text(self, _: str) -> bytes:
        self.read += 1
        if self.fault:
            raise self.fault
        return json.dumps({"keys": self.kept}).encode()

    def keys(self) -> KeySet:
        return KeySet("https://id.example/jwks", read=self.text, now=lambda: self.now)


def test_a_new_key_is_found_and_invented_ones_are_not_looked_for_all_the_time() -> None:
    source = Source(jwk(RSA_KEY, "old"))
    keys = source.keys()
    source.kept = [jwk(OTHER_RSA_KEY, "new")]
    for _ in range(50):
        assert keys.keys("new", "RS256") == []
    assert source.read == 1
    source.now += key_set.PAUSE_S + 1
    assert [key.id for key in keys.keys("new", "RS256")] == ["new"]
    assert keys.keys("old", "RS256") == []
    for number in range(50):
        keys.keys(f"invented-{number}", "RS256")
    assert source.read == 2


def test_a_key_that_was_taken_out_stops_counting_within_minutes() -> None:
    source = Source(jwk(RSA_KEY, "old"), jwk(OTHER_RSA_KEY, "stays"))
    keys = source.keys()
    source.kept = [jwk(OTHER_RSA_KEY, "stays")]
    assert keys.keys("old", "RS256")
    source.now += key_set.MAX_AGE_S + 1
    assert keys.keys("old", "RS256") == []


def test_while_the_source_is_away_known_keys_go_on_to_count(caplog: pytest.LogCaptureFixture) -> None:
    source = Source(jwk(RSA_KEY, "k"))
    keys = source.keys()
    source.fault = ConnectionError("SECRET-PLACE")
    source.now += key_set.MAX_AGE_S + 1
    with caplog.at_level(logging.WARNING):
        assert keys.keys("k", "RS256")
    assert "ConnectionError" in caplog.text and "SECRET-PLACE" not in caplog.text
    source.fault = None
    source.now += key_set.MAX_AGE_S + 1
    assert keys.keys("k", "RS256")


def test_a_source_that_is_away_at_start_is_asked_later() -> None:
    source = Source(jwk(RSA_KEY, "k"))
    source.fault = TimeoutError()
    keys = source.keys()
    assert keys.keys("k", "RS256") == []
    source.fault = None
    source.now += key_set.PAUSE_S + 1
    assert keys.keys("k", "RS256")


def test_what_weakens_the_check_is_said_at_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = verifier(jwt_secret="short")
    assert {"TURNMILL_JWT_SECRET", "TURNMILL_JWT_AUDIENCE", "TURNMILL_JWT_ISSUER"} <= set(caplog.text.replace(":", " ").split())
    assert found.identify(jwt.encode(CLAIMS, b"short".ljust(32, b"\0"), algorithm="HS256")) is not None


def test_time_is_the_clocks_own() -> None:
    assert TokenVerifier(Settings(jwt_secret=SecretStr(SECRET))).identify(token(exp=int(time.time()) + 60)) is not None
