"""The catalogue of a round: which tools there are, under which names, and what of them a request carries.

Tools of different sources that would have one name are told apart here, or refused. With deferred loading a request carries a
list of names and the definitions that were asked for, instead of all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from orchestration.core.errors import CatalogueError
from orchestration.core.handoff import transfer_definition, transfer_name
from orchestration.core.local_calls import HANDOFF, LOAD_TOOLS, LoopTool, submit_tool
from orchestration.core.model import ToolDefinition
from orchestration.core.tool import Discover, ToolSpec, build_catalogue, tool_name

if TYPE_CHECKING:
    from orchestration.core.agent import Agent

#: The tool that loads definitions, a reserved name where they are deferred.
LOAD_TOOLS_NAME = "load_tools"

#: How many definitions one call may load.
MAX_LOADED = 64

#: Characters of the one line that a tool has in that tool's description.
MAX_LINE_CHARS = 120


@dataclass(frozen=True, slots=True)
class Catalogue:
    """What a model may call in one round: `tools` by name, and `own`, which the loop answers. `definitions` are what it is shown."""

    tools: Mapping[str, ToolSpec] = field(default_factory=dict)
    own: Mapping[str, LoopTool] = field(default_factory=dict)
    definitions: tuple[ToolDefinition, ...] = ()


def catalogue_of(
    agent: Agent,
    declared: Sequence[ToolSpec],
    discovered: Sequence[ToolSpec] = (),
    *,
    loaded: Sequence[str] = (),
    described: Mapping[str, str] | None = None,
    closing: bool = False,
) -> Catalogue:
    """The catalogue of a round of `agent`.

    Args:
        declared: tools that somebody named: the agent's own and those attached to the turn.
        discovered: tools that were found on the mesh.
        loaded: names that the conversation has loaded so far.
        described: what each agent is for, by name.
        closing: the model is to answer now: it gets no tools, except the one that takes a typed answer.

    Raises:
        CatalogueError: two tools would have one name; names both.
    """
    own: dict[str, LoopTool] = {}
    if agent.output is not None:
        own[agent.output.tool] = submit_tool(agent.output)
    if closing:
        return Catalogue({}, own, tuple(tool.definition for tool in own.values()))
    tools = build_catalogue([*declared, *(told_apart(declared, discovered) if agent.on_collision == "prefix" else discovered)])
    for name in agent.handoffs:
        definition = transfer_definition(name, (described or {}).get(name, ""))
        own[transfer_name(name)] = LoopTool(transfer_name(name), HANDOFF, definition, name)
    shown = list(tools.values())
    if agent.tool_loading == "deferred" and tools:
        own[LOAD_TOOLS_NAME] = load_tools(list(tools.values()))
        always = [spec for spec in shown if spec.name in agent.always_loaded or spec.prefix in agent.always_loaded]
        asked_for = [tools[name] for name in loaded if name in tools]
        shown = always + [spec for spec in asked_for if spec not in always]
    for name in own:
        if name in tools:
            raise CatalogueError(f"the tool {tools[name].prefix!r} would be {name!r} to the model, a name that the loop needs; rename it")
    first = [own[LOAD_TOOLS_NAME]] if LOAD_TOOLS_NAME in own else []
    rest = [tool for tool in own.values() if tool not in first]
    return Catalogue(tools, own, (*(tool.definition for tool in first + rest), *(spec.definition() for spec in shown)))


def told_apart(declared: Sequence[ToolSpec], discovered: Sequence[ToolSpec]) -> list[ToolSpec]:
    """`discovered` with the tools of every service that is in a collision renamed to `<service>__<name>`; the others, and what
    somebody declared, keep their names. The same whatever order they come in."""
    keys: dict[str, set[str]] = {}
    for spec in (*declared, *discovered):
        keys.setdefault(spec.name, set()).add(spec.prefix)
    colliding = {spec.service for spec in discovered if len(keys[spec.name]) > 1 and spec.service}
    return [replace(spec, name=prefixed(spec.service, spec.name)) if spec.service in colliding else spec for spec in discovered]


def prefixed(prefix: str, name: str) -> str:
    """`name` under the prefix of its source."""
    return tool_name(f"{re.sub(r'[^A-Za-z0-9_-]', '_', prefix)}__{name}")


def of_wishes(wishes: Sequence[Discover], found: Sequence[ToolSpec]) -> list[ToolSpec]:
    """Those of `found` that one of `wishes` is for, under the prefix that the first such wish names."""
    wanted = []
    for spec in found:
        wish = next((wish for wish in wishes if wish.includes(spec.prefix) and _of_service(wish, spec)), None)
        if wish is not None:
            wanted.append(replace(spec, name=prefixed(wish.name_prefix, spec.name)) if wish.name_prefix else spec)
    return wanted


def _of_service(wish: Discover, spec: ToolSpec) -> bool:
    return not wish.services or not spec.service or spec.service in wish.services


def load_tools(specs: Sequence[ToolSpec]) -> LoopTool:
    """The tool that loads definitions, with a line for each tool. The same text as long as the tools are the same, so that a
    provider's prompt cache holds."""
    lines = "\n".join(_line(spec) for spec in sorted(specs, key=lambda spec: spec.name))
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {
            "names": {
                "type": "array",
                "items": {"type": "string"},
                "minItems": 1,
                "maxItems": MAX_LOADED,
                "description": "names from the list",
            }
        },
        "required": ["names"],
    }
    text = f"Load the definitions of tools, as many as needed at once, before calling them. There are:\n{lines}"
    definition = {"type": "function", "function": {"name": LOAD_TOOLS_NAME, "description": text, "parameters": parameters}}
    return LoopTool(LOAD_TOOLS_NAME, LOAD_TOOLS, definition)


def _line(spec: ToolSpec) -> str:
    text = " ".join(spec.description.split())
    sentence = re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0]
    if len(sentence) > MAX_LINE_CHARS:
        sentence = sentence[: MAX_LINE_CHARS - 1] + "…"
    return f"{spec.name}: {sentence}" if sentence else spec.name
