"""What the core needs from outside, as protocols. One module behind each does it with a real system; `wiring.py` puts them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from orchestration.core.ids import StepId, StepKind
from orchestration.core.outbound import Delivery
from orchestration.core.tool import Discover, Tool, ToolAnswer, ToolQuery, ToolSpec


class Mesh(Protocol):
    """The Zenoh mesh, as far as a step needs it. Every method may be called from many threads at once."""

    def ask(self, query: ToolQuery) -> ToolAnswer:
        """Ask one tool once and wait for its first reply, at most `query.timeout_s` seconds. Never raises for what
        the tool or the mesh did; the outcome says it."""
        ...

    def discover(self, wishes: Sequence[Discover], *, sure: bool = False) -> list[ToolSpec]:
        """The `handle` entries of all manifests that match one of `wishes`, in a stable order; an answer may be some seconds old.

        Raises:
            MeshUnavailable: `sure` was wanted, and what the mesh has is not known yet; not for ever.
        """
        ...

    def serve(self, tools: Sequence[Tool[..., Any]]) -> object:
        """Serve `tools` from this process until `close`, under the same rules as a tool host does."""
        ...

    def close(self) -> None:
        """Stop serving and close the session."""
        ...

    def announce_process(self, process: str) -> None:
        """Hold a liveliness token in the name of this process, in place of an earlier one; it drops when the process dies."""
        ...

    def watch_processes(self, on_drop: Callable[[str], object]) -> None:
        """Call `on_drop` with a process's name whenever its token drops, for as long as this process lives."""
        ...


class Queue(Protocol):
    """The task queue: a doorbell. A message that gets lost or comes twice changes nothing."""

    def send(self, steps: Sequence[StepId], *, headers: Sequence[int] | None = None, traceparent: str = "") -> None:
        """Send the tasks of `steps`, each once; `headers` are the indexes of a round's calls that are headers of a chord.

        Raises:
            StoreUnavailable: the broker does not take them.
        """
        ...

    def ring(self, steps: Sequence[StepId]) -> dict[str, tuple[str, str]]:
        """What a commit needs to send `steps` by itself: queue and message for each; empty where only `send` can."""
        ...

    def send_outbound(self, tenant: str, delivery: Delivery, attempt: int) -> None:
        """Send the task of one attempt of a delivery to the outside; raises StoreUnavailable when the broker does not take it."""
        ...

    def queue_name(self, kind: StepKind) -> str:
        """The broker's queue for steps of `kind`."""
        ...

    def is_empty(self, kind: StepKind) -> bool:
        """Whether no message waits in the queue for steps of `kind`. Raises StoreUnavailable when the broker does not say."""
        ...
