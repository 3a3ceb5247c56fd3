"""A round in a process that does not know yet which tools the mesh has: its model is not asked before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestration import Agent, discover, tool
from orchestration.core.errors import MeshUnavailable
from orchestration.core.tool import Discover, ToolSpec
from orchestration.models import ScriptedModel
from orchestration.testing.frames import assert_whole
from orchestration.testing.local import LocalTurnmill


@tool("notes/write")
def write(text: str) -> str:
    """Write a note."""
    return f"wrote {text}"


class Waking:
    """A mesh that says a few times that it is not there yet."""

    def __init__(self, here: LocalTurnmill, times: int) -> None:
        self._discover = here.mesh.discover
        self.left = times
        here.mesh.discover = self.discover  # type: ignore[method-assign]

    def discover(self, wishes: Sequence[Discover], *, sure: bool = False) -> list[ToolSpec]:
        assert sure, "a round's tools have to be known"
        if self.left:
            self.left -= 1
            raise MeshUnavailable("not yet")
        return self._discover(wishes)


def test_a_round_waits_until_its_tools_are_known_and_costs_no_attempt(turnmill: Callable[..., LocalTurnmill]) -> None:
    model = ScriptedModel([[("notes-write", {"text": "one"})], "done"])
    here = turnmill(Agent("a", model, tools=[discover("notes/*")]), write)
    waking = Waking(here, times=8)
    turn = here.ask("a", "hi", conversation_id="c")
    assert (turn["state"], turn["answer"], turn["calls"][0]["state"]) == ("completed", "done", "completed")
    assert waking.left == 0
    assert len(model.requests) == 2
    assert_whole(here.frames("c"))
