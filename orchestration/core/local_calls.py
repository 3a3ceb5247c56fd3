"""Calls that the loop answers itself: handing in a typed answer, loading tool definitions, handing over to another agent.

They never reach the mesh. An answer may carry an effect, which the round's end carries out; within one round the first typed
answer and the first handoff count.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestration.core.call import CallResult, CallState
from orchestration.core.conversation import Entry
from orchestration.core.model import ToolDefinition
from orchestration.core.output import AgentOutput, NotValid
from orchestration.core.safe_json import clean_text, dumps
from orchestration.core.tool import ToolSpec

#: What a call of the loop's own does.
SUBMIT, LOAD_TOOLS, HANDOFF = "submit", "load_tools", "handoff"

#: Codes of a typed answer that did not fit: one that may be mended, and the one too many.
INVALID_ANSWER, ANSWER_ABORTED = "invalid_answer", "answer_aborted"

#: For how many unknown names of one call near ones are looked for.
MAX_GUESSED = 8

#: How many names an error or a result suggests for one that is unknown.
SUGGESTED = 3


@dataclass(frozen=True, slots=True)
class LoopTool:
    """A tool that the loop answers: `does` is one of the words above, `agent` who a handoff goes to."""

    name: str
    does: str
    definition: ToolDefinition
    agent: str = ""

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of its arguments."""
        found: dict[str, Any] = self.definition["function"]["parameters"]
        return found


def submit_tool(output: AgentOutput[Any]) -> LoopTool:
    """The tool that takes the typed answer."""
    text = "Hand in the final answer. Call it exactly once, when the work is done; nothing else counts as the answer."
    definition = {"type": "function", "function": {"name": output.tool, "description": text, "parameters": output.schema}}
    return LoopTool(output.tool, SUBMIT, definition)


class LoopAnswers:
    """Answers the loop's own calls of one round, in order.

    Args:
        invalid: how many invalid typed answers the turn has had before.
        handoffs: how many handoffs it has had, and `max_handoffs` how many it may have.
    """

    def __init__(
        self,
        output: AgentOutput[Any] | None,
        tools: Mapping[str, ToolSpec],
        *,
        invalid: int = 0,
        handoffs: int = 0,
        max_handoffs: int = 1,
    ) -> None:
        self._output = output
        self._tools = tools
        self.invalid = invalid  #: how many invalid typed answers the turn has had by now
        self._may_hand_off = handoffs < max_handoffs
        self._max_handoffs = max_handoffs
        self._handed_to = ""
        self.settled = False  #: whether the turn ends with this round: its answer was accepted, or given up

    def answer(self, tool: LoopTool, arguments: dict[str, Any]) -> CallResult:
        """What the model reads of a call whose arguments fit the tool's schema (of a typed answer: are a JSON object)."""
        if tool.does == SUBMIT:
            return self.submitted(arguments)
        if tool.does == LOAD_TOOLS:
            return self._loaded(arguments.get("names") or [])
        return self._handed_over(tool.agent)

    def submitted(self, arguments: dict[str, Any] | None, fault: str = "") -> CallResult:
        """The same for a typed answer; `fault` says why its arguments are no JSON object, which counts as an invalid answer."""
        assert self._output is not None
        name = self._output.tool
        if self.settled:
            return _failed("answer_settled", {"error": f"{name} already settled this run, call ignored"})
        checked = self._output.check(arguments) if arguments is not None else NotValid(fault)
        if not isinstance(checked, NotValid):
            self.settled = True
            return CallResult(CallState.COMPLETED, "accepted", effect={"output": checked.value})
        self.invalid += 1
        if self.invalid > self._output.max_repairs:
            self.settled = True
            effect = {"attempts": self.invalid, "details": checked.details}
            return _failed(ANSWER_ABORTED, {"error": "invalid answer, run aborted"}, effect)
        told = {"error": f"invalid answer, fix the fields below and call {name} again", "details": checked.details}
        return _failed(INVALID_ANSWER, told)

    def refuses(self, arguments: dict[str, Any]) -> bool:
        """Whether a typed answer would not be accepted, so that no human need be asked about it."""
        assert self._output is not None
        return self.settled or isinstance(self._output.check(arguments), NotValid)

    def _loaded(self, names: Sequence[Any]) -> CallResult:
        wanted = list(dict.fromkeys(clean_text(str(name)) for name in names))
        loaded = [name for name in wanted if name in self._tools]
        told: dict[str, Any] = {"loaded": loaded}
        unknown = [name for name in wanted if name not in self._tools]
        if unknown:
            # a search for each of many would cost more than it helps
            told["unknown"] = {name[:128]: closest(name, self._tools) if place < MAX_GUESSED else [] for place, name in enumerate(unknown)}
        return CallResult(CallState.COMPLETED, dumps(told), effect={"loaded": loaded})

    def _handed_over(self, agent: str) -> CallResult:
        if self.settled:
            return _failed("answer_settled", {"error": "answer_settled", "message": "the turn ends with this round; nobody takes over"})
        if self._handed_to:
            return _failed(
                "handoff_refused", {"error": "handoff_refused", "message": f"this round hands over to {self._handed_to} already"}
            )
        if not self._may_hand_off:
            message = f"this turn was handed over {self._max_handoffs} times, which is as often as it may be; go on with it yourself"
            return _failed("handoff_limit", {"error": "handoff_limit", "message": message})
        self._handed_to = agent
        return CallResult(CallState.COMPLETED, f"Transferred to {agent}.", effect={"handoff": agent})


def _failed(code: str, told: dict[str, Any], effect: dict[str, Any] | None = None) -> CallResult:
    return CallResult(CallState.FAILED, dumps(told), code, effect)


def closest(name: str, known: Iterable[str], most: int = SUGGESTED) -> list[str]:
    """The names among `known` that `name` was probably meant to be, the likeliest first."""
    names = sorted(known)
    found = difflib.get_close_matches(name[:128], names, n=most, cutoff=0.5)
    plain = _plain(name)
    if len(plain) > 2:
        found += [other for other in names if other not in found and (plain in _plain(other) or _plain(other) in plain)]
    return found[:most]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def loaded_so_far(entries: Sequence[Entry]) -> list[str]:
    """The tools that a conversation has loaded, in the order of their loading."""
    return list(dict.fromkeys(name for effect in _effects(entries) for name in effect.get("loaded", ())))


def invalid_so_far(entries: Sequence[Entry], turn_id: str) -> int:
    """How many invalid typed answers a turn has had."""
    codes = (INVALID_ANSWER, ANSWER_ABORTED)
    return sum(1 for entry in entries if entry["turn_id"] == turn_id and entry["dir"] == "out" and entry["data"].get("code") in codes)


def handoffs_so_far(entries: Sequence[Entry], turn_id: str) -> int:
    """How often a turn was handed over."""
    return sum(1 for effect in _effects(entry for entry in entries if entry["turn_id"] == turn_id) if effect.get("handoff"))


def _effects(entries: Iterable[Entry]) -> Iterable[dict[str, Any]]:
    return (entry["data"]["effect"] for entry in entries if entry["dir"] == "out" and entry["data"].get("effect"))
