"""The body of a delivery as JSON or as a form. Nothing here knows signatures; JSON is as strict as everywhere in the gateway."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl

from gateway.plain_json import strict_json
from gateway.webhooks.delivery import Delivery
from orchestration.core.errors import BadRequest

FORM = "application/x-www-form-urlencoded"

#: Fields that one form may have.
MAX_FIELDS = 1000


def is_form(delivery: Delivery) -> bool:
    """Whether the body is a form, as its sender says."""
    return _kind(delivery) == FORM


def form_pairs(body: bytes) -> list[tuple[str, str]]:
    """The fields of a form in their order; raises BadRequest when it is none."""
    try:
        return parse_qsl(body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except ValueError:
        raise BadRequest(f"the body is no form of at most {MAX_FIELDS} fields in UTF-8") from None


def contents(delivery: Delivery) -> tuple[Any, dict[str, str]]:
    """The body as JSON and as form fields: what it is not is None or empty. A form's field `payload` may hold JSON.

    Raises:
        BadRequest, Invalid: it cannot be read as what it says it is.
    """
    if not delivery.body:
        return None, {}
    if is_form(delivery):
        form = dict(form_pairs(delivery.body))
        payload = form.get("payload", "")
        return (strict_json(payload.encode()) if payload.lstrip().startswith("{") else None), form
    kind = _kind(delivery)
    if kind and kind != "application/json" and not kind.endswith("+json"):
        return None, {}
    return strict_json(delivery.body), {}


def _kind(delivery: Delivery) -> str:
    return delivery.headers.get("content-type", "").partition(";")[0].strip().lower()
