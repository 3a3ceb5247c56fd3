"""What a client of a channel may send, and what it is told when something of it was not taken. Pure: texts in, values out."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.approvals import DecisionBody
from gateway.plain_json import strict_json
from gateway.problems import told, validation_errors
from gateway.turns import Input
from orchestration.core.errors import BadRequest, Invalid, RateLimited, TurnmillError
from orchestration.core.ids import ID_PATTERN, is_id


class Say(BaseModel):
    """A message to the agent. Members that are not known here are left alone: clients send what they keep of a message."""

    model_config = ConfigDict(extra="ignore", strict=True, hide_input_in_errors=True)

    input: Input
    on_busy: Literal["queue", "reject", "interrupt", "steer"] = "queue"
    idempotency_key: str | None = Field(None, min_length=1, max_length=255)
    metadata: dict[str, Any] = Field(default_factory=dict)
    model: str | None = Field(None, max_length=200)


@dataclass(frozen=True, slots=True)
class Decide:
    """A human's answer to an approval."""

    approval_id: str
    approved: bool
    arguments: dict[str, Any] | None
    note: str | None


@dataclass(frozen=True, slots=True)
class Cancel:
    """A wish to end a turn: the one under way, or the one named."""

    turn_id: str | None


def parse(text: str) -> Say | Decide | Cancel:
    """What a client's text frame says.

    Raises:
        BadRequest, Invalid: it is no JSON, or nothing that is taken here; says where.
    """
    said = strict_json(text.encode("utf-8", "surrogatepass"))
    if isinstance(said, str):
        said = {"text": said}
    if not isinstance(said, dict):
        raise BadRequest("a message is a JSON text, or an object with text or content")
    kind = said.get("type")
    try:
        if kind == "decision":
            approval_id = said.get("approval_id")
            if not isinstance(approval_id, str) or not is_id(approval_id):
                raise _wrong("approval_id", "the id of an approval")
            body = DecisionBody.model_validate({name: value for name, value in said.items() if name not in ("type", "approval_id")})
            return Decide(approval_id, body.approved, body.arguments, body.note)
        if kind == "cancel":
            turn_id = said.get("turn_id")
            if turn_id is not None and not (isinstance(turn_id, str) and is_id(turn_id)):
                raise _wrong("turn_id", "the id of a turn")
            return Cancel(turn_id)
        if kind not in (None, "message"):
            raise _wrong("type", "message, decision or cancel")
        content = next((said[name] for name in ("text", "content") if said.get(name) is not None), None)
        if content is None:
            raise _wrong("text", "a message has text or content")
        return Say.model_validate({**said, "input": content})
    except ValidationError as error:
        found = validation_errors(error.errors(include_input=False))
        where = ", ".join(".".join(str(part) for part in one["loc"]) for one in found[:5])
        raise Invalid(f"the message does not fit at: {where}", found) from None


def refusal(error: TurnmillError) -> str:
    """The frame that says that something was not taken."""
    members = told(error)
    frame = {"kind": "error", "error": members["code"], **members}
    if isinstance(error, RateLimited):
        frame["retry_after_s"] = max(1, math.ceil(error.retry_after_s))
    return json.dumps(frame, ensure_ascii=False, separators=(",", ":"))


#: Query parameters that are the channel's own.
OWN_PARAMETERS = frozenset({"conversation_id", "ticket", "after", "events"})

#: Names under which a token would end up in the turn and in its model's prompt.
_TOKENS = frozenset({"token", "access_token", "api_key", "apikey", "authorization", "key", "password", "secret"})

#: Parameters that one channel may have, characters of a name and of a value.
MAX_PARAMETERS, MAX_NAME_CHARS, MAX_VALUE_CHARS = 32, 64, 2000


def parameters(query: list[tuple[str, str]], declared: type[BaseModel] | None) -> Mapping[str, Any]:
    """The parameters of a channel for its agent: checked against what the agent declares, else texts of bounded length.

    Raises:
        BadRequest: one looks like a token, which belongs into a header.
        Invalid: one does not fit, or the agent declares its parameters and knows none of this name.
    """
    given: dict[str, Any] = {}
    for name, value in query:
        if name in OWN_PARAMETERS:
            continue
        if name.lower().replace("-", "_") in _TOKENS:
            raise BadRequest("a token is never a query parameter: send Authorization, or a ticket of POST /v1/tickets")
        if len(given) >= MAX_PARAMETERS or len(name) > MAX_NAME_CHARS or len(value) > MAX_VALUE_CHARS:
            raise Invalid(
                "too much in the query", [{"loc": ["query"], "msg": f"{MAX_PARAMETERS} parameters of {MAX_VALUE_CHARS} characters"}]
            )
        given[name] = [*_listed(given[name]), value] if name in given else value
    if declared is None:
        return given
    unknown = [name for name in given if name not in declared.model_fields]
    if unknown and declared.model_config.get("extra") != "allow":
        raise Invalid("the agent does not know these parameters", [{"loc": ["query", name], "msg": "not declared"} for name in unknown])
    try:
        return declared.model_validate(given).model_dump(mode="json")
    except ValidationError as error:
        found = [{**one, "loc": ["query", *one["loc"]]} for one in validation_errors(error.errors(include_input=False))]
        raise Invalid("the channel's parameters do not fit", found) from None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def conversation_in(text: str | None) -> str | None:
    """The conversation that a query names; None for none. Raises Invalid when it is no id."""
    if text is not None and not is_id(text):
        raise Invalid("conversation_id is no id", [{"loc": ["query", "conversation_id"], "msg": f"must match {ID_PATTERN}"}])
    return text


def _wrong(name: str, expected: str) -> Invalid:
    return Invalid(f"the message does not fit at: {name}", [{"loc": [name], "msg": expected}])
