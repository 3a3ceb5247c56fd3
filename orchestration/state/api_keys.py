"""API keys of the gateway: made, listed, revoked and looked up in Redis. Only a hash is kept; what a key's principal may do is for others.

Keys: `tm:keys`, a hash from the SHA-256 of an API key (hex) to a JSON object `{key_id, sub, tenant, scopes, roles, created_at}`.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, cast

from orchestration.core.errors import Invalid
from orchestration.core.ids import is_id
from orchestration.core.principal import ALL_SCOPES, Principal

if TYPE_CHECKING:
    from redis import Redis

#: The Redis hash with all keys.
STORED_AT = "tm:keys"

#: What an API key begins with, so that one that leaked is recognized.
PREFIX = "tmk_"

#: Longer text is no key of ours and is not hashed, in characters.
MAX_CHARS = 200


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is known of one key: everything but the key. `created_at` is RFC 3339 in the store's time."""

    key_id: str
    principal: Principal
    created_at: str


def create_key(redis: Redis, sub: str, tenant: str, scopes: Sequence[str], roles: Sequence[str] = ()) -> tuple[str, ApiKey]:
    """Make and store a new key; returns the key itself, which cannot be had again, and what is kept of it.

    Raises:
        Invalid: an empty `sub`, a tenant that is no id, no scope, or one that does not exist.
    """
    errors = []
    if not 1 <= len(sub) <= 200 or not sub.isprintable():
        errors.append({"loc": ["sub"], "msg": "1 to 200 printable characters"})
    if not is_id(tenant):
        errors.append({"loc": ["tenant"], "msg": "1 to 64 characters of A-Z a-z 0-9 _ -"})
    unknown = [scope for scope in scopes if scope not in ALL_SCOPES]
    if unknown or not scopes:
        errors.append({"loc": ["scope"], "msg": f"at least one of {', '.join(ALL_SCOPES)}"})
    if errors:
        raise Invalid("; ".join(f"{error['loc'][0]}: {error['msg']}" for error in errors), errors)
    key = PREFIX + secrets.token_urlsafe(32)
    seconds, _ = redis.time()
    created_at = datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
    principal = Principal(sub, tenant, tuple(dict.fromkeys(roles)), tuple(dict.fromkeys(scopes)))
    made = ApiKey("key_" + secrets.token_hex(8), principal, created_at)
    redis.hset(STORED_AT, key_digest(key), json.dumps({"key_id": made.key_id, "created_at": created_at, **principal.as_json()}))
    return key, made


def find_key(redis: Redis, key: str) -> Principal | None:
    """Whose key this is; None when it is none of ours or was revoked."""
    if not key.startswith(PREFIX) or len(key) > MAX_CHARS:
        return None
    stored = redis.hget(STORED_AT, key_digest(key))
    return _known(stored).principal if stored is not None else None


def has_keys(redis: Redis, digest: str | None = None) -> bool:
    """Whether there is any key, or the one with this digest."""
    return bool(redis.hlen(STORED_AT) if digest is None else redis.hexists(STORED_AT, digest))


def list_keys(redis: Redis) -> list[ApiKey]:
    """All keys, oldest first."""
    stored = cast("dict[object, str | bytes]", redis.hgetall(STORED_AT))
    return sorted((_known(text) for text in stored.values()), key=lambda known: (known.created_at, known.key_id))


def revoke_key(redis: Redis, key_id: str) -> bool:
    """Make a key void at once; False when there is none with this id."""
    stored = redis.hgetall(STORED_AT)
    fields = [field for field, text in stored.items() if _known(text).key_id == key_id]
    return bool(fields) and bool(redis.hdel(STORED_AT, *cast("list[str]", fields)))


def _known(text: str | bytes) -> ApiKey:
    data = json.loads(text)
    return ApiKey(data["key_id"], Principal.from_json(data), data["created_at"])


def key_digest(key: str) -> str:
    """What is kept of a key: its SHA-256 in hexadecimal."""
    # A key has 256 random bits, so a plain hash cannot be guessed back; a slow one would only slow the gateway.
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()
