"""The settings: one frozen class, read once at start from `TURNMILL_…` and handed down. `docs/settings.md` is made from it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from orchestration.core.errors import Misconfigured


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
    discovery_s: float = Field(2.0, gt=0, le=3600, description="seconds for which what discovery found is used again")
    api_keys: SecretStr = Field(
        SecretStr(""), description='gateway API keys as JSON: [{"key": …, "sub": …, "tenant": …, "scopes": […], "roles": […]}]'
    )
    host: str = Field("127.0.0.1", description="address that the gateway is served on, as far as it must know; without keys only loopback")
    public_url: str = Field("", description="URL under which clients reach the gateway")
    max_body_bytes: int = Field(1_048_576, gt=0, description="largest request body that the gateway takes, in bytes")
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
    drain_s: float = Field(25.0, ge=0, description="seconds that a stopping worker gives its running steps")
    log_format: Literal["text", "json"] = Field("text", description="form of log lines")

    @field_validator("mesh_connect", "mesh_listen", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @property
    def broker(self) -> str:
        """Where Celery's messages go."""
        return self.broker_url or self.redis_url


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
