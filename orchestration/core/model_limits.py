"""How much of a model may be used at once and in a minute, by all workers together. Who counts is behind a port."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

from orchestration.core.errors import Misconfigured


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits of what is counted under one name.

    Args:
        name: models with the same name share the limits.
        concurrency: calls under way at once; None for any number.
        requests_per_minute: calls begun within any 60 s.
        tokens_per_minute: tokens used within about 60 s; what a call will use is estimated until its answer is there.

    Raises:
        Misconfigured: no name, a number that is no positive one, or no limit at all.
    """

    name: str
    concurrency: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise Misconfigured("limits of a model need a name under which they are counted")
        numbers = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "name"}
        for name, value in numbers.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise Misconfigured(f"limits of model {self.name!r}: {name} is a whole number of at least 1, or None")
        if all(value is None for value in numbers.values()):
            raise Misconfigured(f"limits of model {self.name!r}: none is set")


@dataclass(frozen=True, slots=True)
class Taken:
    """What came of asking for a place: `wait_s` is 0 when it was given, else the seconds after which to ask again."""

    wait_s: float = 0.0


class Places(Protocol):
    """Who gives places among all workers, for one step. A place that is never given back is free again when the step has ended or its
    process is gone."""

    def take(self, limits: ModelLimits, estimated_tokens: int) -> Taken:
        """A place for one call, or when to ask for it again."""
        ...

    def give_back(self, limits: ModelLimits, estimated_tokens: int, used_tokens: int) -> None:
        """End the call; whoever waits longest goes on at once. Never raises."""
        ...
