"""Callers' own tokens at rest: sealed with a key of the settings, and bound to the principal that came in with them.

Who may read them back is a tool step that asks for an agent with `forward_token`; nothing else opens one.
"""

from __future__ import annotations

import base64
import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from orchestration.core.errors import Misconfigured, Unauthorized
from orchestration.core.principal import Principal
from orchestration.settings import Settings

_NONCE_BYTES = 12


class TokenSeal:
    """Seals with the first key of `TURNMILL_TOKEN_KEY` and opens with any of them. False where there is none. Safe for threads."""

    def __init__(self, settings: Settings) -> None:
        self._keys = [AESGCM(base64.b64decode(key)) for key in settings.token_key.get_secret_value().split()]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def seal(self, token: str, principal: Principal) -> str:
        """`token` as it may be stored. Raises Misconfigured without a key."""
        if not self._keys:
            raise Misconfigured("TURNMILL_TOKEN_KEY is needed to keep a caller's token for its turn")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = self._keys[0].encrypt(nonce, token.encode(), _owner(principal))
        return base64.b64encode(nonce + sealed).decode()

    def open(self, sealed: str, principal: Principal) -> str:
        """The token that was sealed for this principal.

        Raises:
            Unauthorized: it was sealed with a key that is gone, or for somebody else.
        """
        raw = base64.b64decode(sealed)
        for key in self._keys:
            try:
                return key.decrypt(raw[:_NONCE_BYTES], raw[_NONCE_BYTES:], _owner(principal)).decode()
            except InvalidTag:
                continue
        raise Unauthorized("the caller's token cannot be read any more; the key that it was kept with has changed")


def _owner(principal: Principal) -> bytes:
    return f"{principal.tenant}\n{principal.sub}".encode("utf-8", "replace")
