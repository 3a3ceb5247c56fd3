"""The settings: one frozen class, read once at start from `TURNMILL_…` and handed down. `docs/settings.md` is made from it."""

from __future__ import annotations

import base64
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, TypeAdapter, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from orchestration.core.errors import Misconfigured
from orchestration.core.limits import Price


class Settings(BaseSettings):
    """Every setting has a default that serves development on one machine."""

    model_config = SettingsConfigDict(env_prefix="TURNMILL_", frozen=True, extra="ignore", hide_input_in_errors=True)

    redis_url: str = Field("redis://127.0.0.1:6379/0", description="Redis or Valkey with state, frames and Celery results")
    broker_url: str = Field("", description="Celery's broker; empty means the same as TURNMILL_REDIS_URL")
    agents: str = Field("", description="dotted path of the module that declares agents, webhooks and the workers' own tools")
    celery_app: str = Field("workers.app:app", description="the Celery app that every process publishes with")
    service: str = Field("turnmill", description="this deployment's name on the mesh")
    mesh_connect: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="comma-separated Zenoh endpoints to connect to, e.g. tcp/10.0.0.5:7447"
    )
    mesh_listen: Annotated[tuple[str, ...], NoDecode] = Field((), description="comma-separated Zenoh endpoints to listen on")
    mesh_config: str = Field("", description="path of a Zenoh configuration file (TLS, access control); the two above are laid over it")
    mesh_secret: SecretStr = Field(
        SecretStr(""), description="signs and checks the token that each mesh query carries; empty: queries carry none"
    )
    mesh_caller_tokens: bool = Field(
        False, description="our tool hosts also take the callers' own tokens, checked by the TURNMILL_JWT_… settings (see `forward_token`)"
    )
    discovery_s: float = Field(2.0, gt=0, le=3600, description="seconds for which what discovery found is used again")
    api_keys: SecretStr = Field(
        SecretStr(""), description='gateway API keys as JSON: [{"key": …, "sub": …, "tenant": …, "scopes": […], "roles": […]}]'
    )
    jwt_secret: SecretStr = Field(
        SecretStr(""), description="secret of tokens (JWT) signed with HS256, at least 32 bytes; several, space-separated, all hold"
    )
    jwt_jwks: str = Field(
        "", description="path or URL of the key set (JWKS) of tokens signed with RS256 or ES256; read again when a key is new"
    )
    jwt_issuer: str = Field("", description="the `iss` that a token must have; empty takes any, which the gateway warns about")
    jwt_audience: str = Field("", description="the `aud` that a token must have; empty refuses tokens that are made out to anybody")
    token_key: SecretStr = Field(
        SecretStr(""),
        description="key under which callers' tokens are kept for agents with `forward_token`: 32 bytes in base64; of several, separated "
        "by spaces, the first seals and all open",
    )
    host: str = Field("127.0.0.1", description="address that the gateway is served on, as far as it must know; without keys only loopback")
    public_url: str = Field("", description="URL under which clients reach the gateway; for links, and for signatures that cover the URL")
    trusted_proxies: Annotated[tuple[str, ...], NoDecode] = Field(
        ("127.0.0.0/8", "::1/128"), description="comma-separated addresses or networks whose X-Forwarded-Proto, -Host and -For are believed"
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="comma-separated origins whose pages may call the gateway, e.g. https://app.example.com; none without it"
    )
    rate_per_s: float = Field(
        500.0, ge=0, le=100_000, description="requests per second that one principal may send on average; 0 for no bound"
    )
    rate_burst: int = Field(5000, ge=1, le=100_000, description="requests that one principal may send at once before the average counts")
    channel_inbound: int = Field(
        32, ge=1, le=10_000, description="messages of one channel that may wait to be stored before more are refused"
    )
    max_body_bytes: int = Field(
        1_048_576, gt=0, description="largest request body, webhook or channel message that the gateway takes, in bytes"
    )
    lease_s: float = Field(10.0, ge=1, le=600, description="seconds after which a silent process loses its steps")
    lost_after_s: float = Field(
        15.0, ge=1, le=3600, description="seconds after which a step that was sent but not claimed may count as lost"
    )
    max_waiting_turns: int = Field(100, gt=0, description="waiting turns that one conversation may have")
    max_tenant_waiting_turns: int = Field(100_000, gt=0, description="waiting turns that one tenant may have")
    frames_kept: int = Field(10_000, gt=0, description="frames kept for each conversation; older ones are trimmed")
    turn_kept_s: int = Field(7 * 86_400, gt=0, description="seconds for which an ended turn and its journal are kept")
    conversation_kept_s: int = Field(90 * 86_400, gt=0, description="seconds for which a conversation is kept after its last turn")
    approval_kept_s: int = Field(90 * 86_400, gt=0, description="seconds for which a decided approval is kept")
    audit_kept_s: int = Field(0, ge=0, description="seconds for which entries of the audit stream are kept; 0 keeps them for ever")
    callback_secret: SecretStr = Field(
        SecretStr(""),
        description="`whsec_…` secret that signs calls to a `callback_url`; empty: each tenant's own, see `turnmill callbacks secret`",
    )
    callback_networks: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="comma-separated networks that a `callback_url` may lead to although they are not public, e.g. 10.1.0.0/16"
    )
    prices: str = Field(
        "",
        description="what a million tokens cost, by model, as JSON: "
        '{"gpt-5": {"input": 1.25, "output": 10, "cached": 0.125}}; `*` is for all other models',
    )
    drain_s: float = Field(25.0, ge=0, description="seconds that a stopping worker gives its running steps")
    deaf_after_s: float = Field(
        20.0, ge=1, le=600, description="seconds for which steps may wait beside free slots before a worker that takes none ends itself"
    )
    log_format: Literal["text", "json"] = Field("text", description="form of log lines")

    @field_validator("mesh_connect", "mesh_listen", "trusted_proxies", "cors_origins", "callback_networks", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("callback_secret")
    @classmethod
    def _whsec(cls, value: SecretStr) -> SecretStr:
        for secret in value.get_secret_value().split():
            if not secret.startswith("whsec_") or len(_decoded(secret.removeprefix("whsec_"))) < 16:
                raise ValueError("whsec_ and at least 16 bytes in base64; several are separated by spaces")
        return value

    @field_validator("token_key")
    @classmethod
    def _aes_key(cls, value: SecretStr) -> SecretStr:
        if any(len(_decoded(key)) != 32 for key in value.get_secret_value().split()):
            raise ValueError("32 bytes in base64, as `openssl rand -base64 32` gives; several are separated by spaces")
        return value

    @field_validator("prices")
    @classmethod
    def _readable_prices(cls, value: str) -> str:
        _prices_in(value)
        return value

    @property
    def price_list(self) -> dict[str, Price]:
        """The prices by model."""
        return _prices_in(self.prices)

    @property
    def broker(self) -> str:
        """Where Celery's messages go."""
        return self.broker_url or self.redis_url


@cache
def _prices_in(text: str) -> dict[str, Price]:
    try:
        return TypeAdapter(dict[str, Price]).validate_json(text) if text.strip() else {}
    except ValidationError:
        raise ValueError('a JSON object: a model\'s name -> {"input": …, "output": …} and perhaps "cached"') from None


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return b""


def load_settings(**overrides: Any) -> Settings:
    """The settings of this process.

    Raises:
        Misconfigured: names each wrong setting and what was expected; never shows its value, which may be a secret.
    """
    try:
        return Settings(**overrides)
    except ValidationError as error:
        wrong = "; ".join(f"TURNMILL_{str(e['loc'][0]).upper()}: {e['msg']}" for e in error.errors(include_input=False, include_url=False))
        raise Misconfigured(f"wrong settings: {wrong}") from None
