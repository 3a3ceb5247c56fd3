"""Limits of models across all workers, counted in Redis. The scripts `model_take.lua` and `model_give.lua` decide;
this gives them types."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from orchestration.core.errors import StoreUnavailable
from orchestration.core.ids import StepId
from orchestration.core.model_limits import ModelLimits, Taken
from orchestration.state.journal import Claim
from orchestration.state.store import Store

log = logging.getLogger("turnmill.models")

#: Called with steps that have waited for a place and may come now.
Wake = Callable[[Sequence[StepId]], object]


class ModelPlaces:
    """Places at limited models for one claimed step. A call takes one and gives it back; one that is lost is free when its step ends."""

    def __init__(self, store: Store, claim: Claim, wake: Wake) -> None:
        self._store = store
        self._claim = claim
        self._wake = wake
        self._refused: list[ModelLimits] = []

    def take(self, limits: ModelLimits, estimated_tokens: int) -> Taken:
        """A place for one call, or when to ask again.

        Raises:
            StoreUnavailable: Redis does not answer; without it nobody can count, and the model is not asked.
        """
        answer = self._store.run(
            "model_take",
            limits.name,
            self._claim.owner,
            str(self._claim.step),
            limits.concurrency or 0,
            limits.requests_per_minute or 0,
            limits.tokens_per_minute or 0,
            estimated_tokens,
        )
        if answer[0] == "taken":
            return Taken()
        self._refused.append(limits)
        return Taken(max(0.001, int(answer[1]) / 1000))

    def give_back(self, limits: ModelLimits, estimated_tokens: int, used_tokens: int) -> None:
        """End the call, and wake whoever has waited longest."""
        try:
            self._give(limits, used_tokens - estimated_tokens if limits.tokens_per_minute else 0)
        except StoreUnavailable as error:
            log.warning("a place at model %r was not given back: %s; it is free when the step ends", limits.name, error)

    def look_again(self) -> None:
        """Once the step's pause is recorded: a place that became free just before went to nobody, so whoever waits is woken for it."""
        for limits in self._refused:
            try:
                self._give(limits, 0)
            except StoreUnavailable:
                return  # the pause ends by itself

    def _give(self, limits: ModelLimits, more_tokens: int) -> None:
        owner, step = self._claim.owner, str(self._claim.step)
        woken = self._store.run("model_give", limits.name, owner, step, limits.concurrency or 0, more_tokens)
        if woken:
            self._wake([StepId.parse(text) for text in woken])
