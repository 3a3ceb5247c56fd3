"""The public keys that tokens are signed with: a JWKS file or URL, read again when a key is new or some minutes have passed.

Only keys that can check RS256 or ES256 are kept, each for its own algorithm, so that no token chooses how it is checked.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from orchestration.core.errors import Misconfigured

log = logging.getLogger(__name__)

#: Seconds after which the set is read again.
MAX_AGE_S = 300.0

#: Shortest pause between two readings, in seconds: tokens with invented key ids must not make us ask all the time.
PAUSE_S = 10.0

#: Largest set that is read, in bytes, and seconds that reading may take.
MAX_BYTES, READ_S = 1_048_576, 5.0

#: Smallest RSA key that counts, in bits.
MIN_RSA_BITS = 2048

_ALGORITHMS = {"RSA": "RS256", "EC": "ES256"}


@dataclass(frozen=True, slots=True)
class Key:
    """One public key: its id (empty for none), the one algorithm that it checks, the key itself."""

    id: str
    algorithm: str
    public: RSAPublicKey | EllipticCurvePublicKey


class KeySet:
    """The keys at a path or URL. Safe for threads.

    Args:
        source: a path, or an https:// URL (http:// on loopback only).
        read: gives the text at `source`; raises OSError or ValueError.
        now: a monotonic clock in seconds.

    Raises:
        Misconfigured: a file that cannot be read or holds no key, or a URL that is not safe. A URL that does not answer is asked later.
    """

    def __init__(self, source: str, *, read: Callable[[str], bytes] | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._remote = "://" in source
        self._read = read or (_fetch if self._remote else _load)
        self._now = now
        self._lock = threading.Lock()
        self._keys: tuple[Key, ...] = ()
        self._read_at = float("-inf")
        if self._remote:
            _require_safe(source)
        problem = self._refresh()
        if problem and not self._remote:
            raise Misconfigured(f"TURNMILL_JWT_JWKS: {problem}")

    def keys(self, id_: str | None, algorithm: str) -> list[Key]:
        """The keys that a token with this key id and algorithm may be signed with; without an id all of the algorithm."""
        age_s = self._now() - self._read_at
        if age_s > MAX_AGE_S or (not self._fitting(id_, algorithm) and age_s > PAUSE_S):
            self._refresh()
        return self._fitting(id_, algorithm)

    def _fitting(self, id_: str | None, algorithm: str) -> list[Key]:
        return [key for key in self._keys if key.algorithm == algorithm and (id_ is None or key.id == id_)]

    def _refresh(self) -> str:
        """Read the set; what was known stays where that fails. Returns what went wrong, empty for nothing."""
        if not self._lock.acquire(blocking=not self._keys):
            return ""  # another thread reads; what is known serves meanwhile
        try:
            if self._now() - self._read_at <= min(PAUSE_S, 1.0):
                return ""
            self._read_at = self._now()
            found = _keys_in(self._read(self._source))
            self._keys = found
            return "" if found else "there is no key for RS256 or ES256 in it"
        except (OSError, ValueError, HTTPException) as error:
            problem = f"the key set cannot be read ({type(error).__name__})"
            log.warning("%s; %d known keys go on to count", problem, len(self._keys))
            return problem
        finally:
            self._lock.release()


def _keys_in(text: bytes) -> tuple[Key, ...]:
    data = json.loads(text)
    entries = data.get("keys") if isinstance(data, dict) else None
    if not isinstance(entries, list):
        raise ValueError("no key set")
    found = [key for key in (_key(entry) for entry in entries[:100] if isinstance(entry, dict)) if key is not None]
    return tuple(found)


def _key(entry: dict[str, Any]) -> Key | None:
    algorithm = _ALGORITHMS.get(str(entry.get("kty")))
    operations = entry.get("key_ops")
    # A shared secret (kty "oct") is none of these: whoever can read the set could sign with it.
    if algorithm is None or entry.get("use", "sig") != "sig" or entry.get("alg", algorithm) != algorithm:
        return None
    if isinstance(operations, list) and "verify" not in operations:
        return None
    try:
        public = jwt.PyJWK({name: value for name, value in entry.items() if name != "d"}, algorithm).key
    except (jwt.PyJWTError, ValueError, TypeError):
        return None
    if isinstance(public, RSAPublicKey) and public.key_size >= MIN_RSA_BITS:
        return Key(str(entry.get("kid", "")), algorithm, public)
    if isinstance(public, EllipticCurvePublicKey) and public.curve.name == "secp256r1":
        return Key(str(entry.get("kid", "")), algorithm, public)
    return None


def _require_safe(url: str) -> None:
    parts = urlsplit(url)
    local = parts.hostname in ("localhost", "127.0.0.1", "::1")
    if parts.scheme != "https" and not (parts.scheme == "http" and local):
        raise Misconfigured("TURNMILL_JWT_JWKS: a path or an https:// URL was expected (http:// on loopback only)")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """A redirect is an error: the set is where the settings say, or nowhere."""


def _fetch(url: str) -> bytes:
    opener = urllib.request.build_opener(_NoRedirect)
    request = urllib.request.Request(url, headers={"Accept": "application/json"})
    with opener.open(request, timeout=READ_S) as answer:
        return _bounded(answer.read(MAX_BYTES + 1))


def _load(path: str) -> bytes:
    with Path(path).open("rb") as file:
        return _bounded(file.read(MAX_BYTES + 1))


def _bounded(text: bytes) -> bytes:
    if len(text) > MAX_BYTES:
        raise ValueError("too large")
    return text
