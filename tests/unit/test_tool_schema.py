"""A function's signature is the schema of its tool, by the library whose annotations it has."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import pytest
from pydantic import BaseModel, Field, ValidationError

from orchestration import Agent, MeshTool, tool
from orchestration.core.errors import Misconfigured
from orchestration.models import ScriptedModel
from orchestration.testing.local import LocalTurnmill

Turnmill = Callable[..., LocalTurnmill]


class Ref(msgspec.Struct):
    id: int
    name: str
    more: Ref | None = None


class Place(BaseModel):
    city: str


@tool("refs/search")
def search(query: str, limit: Annotated[int, msgspec.Meta(ge=1, le=10)] = 5) -> list[Ref]:
    """Search the references."""
    return [Ref(number, query) for number in range(limit)]


@tool("refs/keep")
async def keep(ref: Ref, tags: list[str] = []) -> Any:  # noqa: B006
    """Keep one."""
    return {"kept": ref, "tags": tags}


def test_annotations_of_msgspec_are_the_schema_and_are_checked() -> None:
    schema = search.spec.parameters
    assert schema["properties"]["limit"] == {"type": "integer", "minimum": 1, "maximum": 10, "default": 5}
    assert schema["required"] == ["query"] and schema["type"] == "object" and "title" not in schema
    assert search.validate({"query": "x", "limit": "3", "other": 1}) == {"query": "x", "limit": 3}
    with pytest.raises(ValidationError) as caught:
        search.validate({"query": "x", "limit": 11})
    [fault] = caught.value.errors()
    assert (fault["loc"], fault["msg"]) == (("limit",), "Expected `int` <= 10")
    with pytest.raises(ValidationError) as caught:
        keep.validate({"ref": {"id": 1, "name": "{x}", "more": {"id": "y"}}, "tags": []})
    assert caught.value.errors()[0]["loc"] == ("ref", "more", "id")
    assert keep.validate({"ref": {"id": 1, "name": "a"}})["ref"] == Ref(1, "a")
    assert "Ref" in keep.spec.parameters["$defs"]


def test_structs_reach_the_model_as_data(turnmill: Turnmill) -> None:
    asked = [("refs-search", {"query": "x", "limit": 2}), ("refs-keep", {"ref": {"id": 7, "name": "a"}})]
    model = ScriptedModel([asked, [("refs-search", {"query": "x", "limit": 99})], "done"])
    turnmill(Agent("a", model, tools=[search, keep])).ask("a", "go")
    first, second = [json.loads(message["content"]) for message in model.requests[1].messages[-2:]]
    assert first == [{"id": 0, "name": "x", "more": None}, {"id": 1, "name": "x", "more": None}]
    assert second == {"kept": {"id": 7, "name": "a", "more": None}, "tags": []}
    assert json.loads(model.requests[2].messages[-1]["content"])["error"] == "invalid_arguments"


def test_annotations_of_pydantic_are_the_schema_and_are_checked() -> None:
    @tool("geo/look")
    def look(place: Place, limit: Annotated[int, Field(ge=1)] = 1) -> str:
        """Look."""
        return place.city

    assert look.spec.parameters["properties"]["limit"]["minimum"] == 1
    assert look.validate({"place": {"city": "Paris"}}) == {"place": Place(city="Paris"), "limit": 1}
    with pytest.raises(ValidationError):
        look.validate({"place": {"city": "Paris"}, "limit": 0})


def test_one_library_checks_all() -> None:
    with pytest.raises(Misconfigured, match="mixes annotations"):

        @tool("geo/both")
        def both(place: Place, limit: Annotated[int, msgspec.Meta(ge=1)]) -> str:
            """Both."""
            return ""


def test_a_definition_that_is_changed_in_place_is_what_the_next_round_is_told(turnmill: Turnmill) -> None:
    parameters: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}}
    declared = MeshTool("math/double", parameters=parameters, description="Double it.")

    def change() -> None:
        parameters["properties"]["y"] = {"type": "string"}
        parameters["required"] = ["y"]

    model = ScriptedModel([[("math-double", {"x": "one"})], [("math-double", {"x": 1})], "done"])
    here = turnmill(Agent("a", model, tools=[declared], on_round=lambda checkpoint: change()))
    here.ask("a", "go")
    assert "y" in model.requests[1].tools[0]["function"]["parameters"]["properties"]
    told = json.loads(model.requests[2].messages[-1]["content"])
    assert told["error"] == "invalid_arguments" and told["details"] == [{"loc": [], "msg": "missing: y"}]
