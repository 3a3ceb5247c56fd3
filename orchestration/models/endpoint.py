"""Where a model is served and with which key: the part of an adapter that is the same for every provider."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from pydantic import SecretStr

from orchestration.core.errors import Misconfigured, ModelError
from orchestration.core.model import ModelFault


class Endpoint:
    """A model's name, the URL that is asked for it, and its key, which is looked up at each call and never shown.

    Args:
        kind: the adapter's name, for errors.
        path: what follows the base URL, e.g. `/chat/completions`.
        api_key: the key itself; goes before the environment.
        api_key_env: the environment variable with the key; empty for a server that wants none.
        key_optional: whether to go on without a key when that variable is not set.
        timeout_s: seconds for a whole call.
        read_timeout_s: seconds of silence after which a call is given up.

    Raises:
        Misconfigured: no model, a URL that is none, or a time that is not above 0.
    """

    def __init__(
        self,
        kind: str,
        model: str,
        base_url: str,
        path: str,
        *,
        api_key: str | None,
        api_key_env: str,
        key_optional: bool,
        timeout_s: float,
        read_timeout_s: float,
        extra_headers: Mapping[str, str] | None,
    ) -> None:
        if not isinstance(model, str) or not model.strip():
            raise Misconfigured(f"{kind}: the model's name is missing")
        for name, value in (("timeout_s", timeout_s), ("read_timeout_s", read_timeout_s)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
                raise Misconfigured(f"{kind}({model!r}): {name} is a number of seconds above 0")
        self.kind = kind
        self.model = model
        self.timeout_s = float(timeout_s)
        self.read_timeout_s = float(read_timeout_s)
        self._api_key = SecretStr(api_key) if api_key is not None else None
        self._api_key_env = api_key_env
        self._key_optional = key_optional
        self._extra_headers = {name: SecretStr(value) for name, value in (extra_headers or {}).items()}
        self.url, self.host = _url(kind, model, base_url, path)

    @property
    def who(self) -> str:
        """Model and server, as errors name them."""
        return f"model {self.model!r} at {self.host}"

    def key(self) -> str:
        """The key for a call made now; empty when the server wants none.

        Raises:
            ModelError: it is not there, or no text that a header can hold (`auth`); names the variable, never the value.
        """
        source = "api_key"
        if self._api_key is not None:
            key = self._api_key.get_secret_value().strip()
        elif not self._api_key_env:
            return ""
        else:
            source = f"environment variable {self._api_key_env}"
            key = os.environ.get(self._api_key_env, "").strip()
            if not key and self._key_optional:
                return ""
        if not key:
            raise ModelError(ModelFault.AUTH, f"{self.who}: no key; set {source}", retryable=False)
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ModelError(ModelFault.AUTH, f"{self.who}: what {source} holds is no key", retryable=False)
        return key

    def headers(self, own: Mapping[str, str]) -> dict[str, str]:
        """The headers of a request: the common ones, the adapter's `own`, and over them what the user set."""
        # Compressed events would be held back until a block is full.
        headers = {"content-type": "application/json", "accept-encoding": "identity", "user-agent": "turnmill", **own}
        headers.update({name.lower(): value.get_secret_value() for name, value in self._extra_headers.items()})
        return headers

    def __repr__(self) -> str:
        return f"{self.kind}({self.model!r}, host={self.host!r})"


def thinking_field(send_thinking: bool | str) -> str | None:
    """The field that `send_thinking` names; True is the usual one."""
    if isinstance(send_thinking, str):
        return send_thinking or None
    return "reasoning_content" if send_thinking else None


def offered_names(tools: Any) -> list[str]:
    """The names of the tools in a list of definitions."""
    functions = (tool.get("function") for tool in tools or () if isinstance(tool, Mapping))
    return [function["name"] for function in functions if isinstance(function, Mapping) and isinstance(function.get("name"), str)]


def _url(kind: str, model: str, base_url: str, path: str) -> tuple[str, str]:
    try:
        parts = urlsplit(base_url.strip())
        port = f":{parts.port}" if parts.port else ""
    except (ValueError, AttributeError):
        raise Misconfigured(f"{kind}({model!r}): base_url is no URL") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Misconfigured(f"{kind}({model!r}): base_url begins with http:// or https:// and names a host")
    before = parts.path.rstrip("/")
    whole = before if before.endswith(path) else before + path
    return urlunsplit((parts.scheme, parts.netloc, whole, parts.query, "")), f"{parts.hostname}{port}"
