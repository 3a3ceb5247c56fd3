"""The shop's tools, served by `turnmill tools examples.shop.tools`. A refund moves real money, so a human agrees to each."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from orchestration import tool


@tool("math/add", idempotent=True)
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


@tool("billing/refund", approval="moves real money")
def refund(order_id: str, amount: Annotated[float, Field(gt=0, le=10_000)]) -> dict[str, Any]:
    """Refund an order: `amount` in euros goes back to the customer who placed it."""
    return {"order_id": order_id, "refunded": amount, "currency": "EUR"}
