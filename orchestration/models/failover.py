"""Several models as one: the next is asked when one cannot answer.

Whether a step is tried again is for the step to say; here each model is asked at most once a call, and nobody waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence

from orchestration.core.errors import Misconfigured, ModelBusy, ModelError
from orchestration.core.model import Delta, Message, Model, ModelFault, ModelReply, Sink, ToolDefinition
from orchestration.models.calling import call_model, name_of

_log = logging.getLogger(__name__)

#: Faults after which another model may do better: the provider's troubles, and a key or account that is no good there. A
#: request that is too long, refused or filtered would fare no better elsewhere, and hides a mistake when it does.
NEXT_AFTER = frozenset(
    {
        ModelFault.UNAVAILABLE,
        ModelFault.RATE_LIMITED,
        ModelFault.QUOTA,
        ModelFault.AUTH,
        ModelFault.PROTOCOL,
        ModelFault.TRUNCATED,
    }
)


class Failover:
    """Asks `models` in order until one answers. Thread-safe; each process keeps its own memory of what failed.

    A model that failed is passed over for a while: for the pause that it asked for, at least `rest_s`. When all rest, the one
    that rests least is asked first.

    Once a piece of an answer was shown, its words cannot be taken back here: the error goes up as one that may be tried
    again, the step declares the pieces void, and its next attempt begins with the next model, since the failed one rests.

    Args:
        models: at least one; any model, sync or async.
        on: kinds of fault after which the next is asked.
        rest_s: seconds for which a failed model is passed over.
        clock: seconds that only grow; for tests.

    Raises:
        Misconfigured: no models, or something that is none.
    """

    def __init__(
        self,
        *models: Model,
        on: Collection[ModelFault] = NEXT_AFTER,
        rest_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not models:
            raise Misconfigured("Failover: at least one model")
        for model in models:
            if not callable(getattr(model, "complete", None)):
                raise Misconfigured(f"Failover: {type(model).__name__} has no complete(messages, *, tools=None)")
        self.models = models
        self.model = " > ".join(str(getattr(model, "model", type(model).__name__)) for model in models)
        self._on = frozenset(on)
        self._rest_s = rest_s
        self._clock = clock
        self._lock = threading.Lock()
        self._rests_until: dict[int, float] = {}

    def complete(
        self, messages: Sequence[Message], *, tools: Sequence[ToolDefinition] | None = None, sink: Sink | None = None
    ) -> ModelReply:
        """The first answer that one of the models gives.

        Raises:
            ModelError: one failed for a reason that the next cannot mend, or after pieces were shown, or all failed;
                then `retryable` if any of them is, and `retry_after_s` is the shortest pause.
        """
        failed: list[ModelError] = []
        order = self._order()
        for place, index in enumerate(order):
            model = self.models[index]
            showing = _Showing(sink) if sink is not None else None
            try:
                reply = call_model(model, messages, tools=tools, sink=showing)
            except ModelError as error:
                if showing is not None and showing.raised is error:
                    raise  # the caller's own, by way of its sink
                if error.kind not in self._on:
                    raise
                if isinstance(error, ModelBusy):  # nothing failed: only its limits leave no room
                    failed.append(error)
                    continue
                self._rest(index, error)
                _log.warning("%s failed (%s); %d more to ask", name_of(model), error.kind, len(order) - place - 1)
                if showing is not None and showing.shown:
                    raise _void(error, others=len(self.models) > 1) from None
                failed.append(error)
            else:
                self._recovered(index)
                return reply
        raise _all_failed(self.model, failed) from None

    def _order(self) -> list[int]:
        now = self._clock()
        with self._lock:
            rests = dict(self._rests_until)
        ready = [index for index in range(len(self.models)) if rests.get(index, now) <= now]
        resting = sorted((index for index in range(len(self.models)) if index not in ready), key=lambda index: rests[index])
        return ready + resting

    def _rest(self, index: int, error: ModelError) -> None:
        with self._lock:
            self._rests_until[index] = self._clock() + max(self._rest_s, error.retry_after_s or 0.0)

    def _recovered(self, index: int) -> None:
        with self._lock:
            self._rests_until.pop(index, None)

    def __repr__(self) -> str:
        return f"Failover({self.model!r})"


class _Showing:
    """The caller's sink, and whether anything went through it."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.shown = False
        self.raised: BaseException | None = None

    def __call__(self, delta: Delta) -> None:
        self.shown = True
        try:
            self._sink(delta)
        except BaseException as error:
            self.raised = error
            raise


def _void(error: ModelError, *, others: bool) -> ModelError:
    """`error` for a step that has shown pieces: worth another attempt when another model can make it, and then at once."""
    return ModelError(
        error.kind,
        str(error),
        retryable=error.retryable or others,
        retry_after_s=None if others else error.retry_after_s,
        status=error.status,
    )


def _all_failed(who: str, failed: Sequence[ModelError]) -> ModelError:
    if len(failed) == 1:
        return failed[0]
    if all(isinstance(error, ModelBusy) for error in failed):
        return min(failed, key=lambda error: error.retry_after_s or 0.0)
    hopeful = [error for error in failed if error.retryable]
    pauses = [error.retry_after_s for error in hopeful]
    known = [pause for pause in pauses if pause is not None]
    last = (hopeful or list(failed))[-1]
    return ModelError(
        last.kind,
        f"none of {who} answered: " + "; ".join(str(error) for error in failed),
        retryable=bool(hopeful),
        # One that named no pause may be asked after the step's own.
        retry_after_s=min(known) if known and len(known) == len(pauses) else None,
        status=last.status,
    )
