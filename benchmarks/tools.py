"""The benchmark's tool."""

from __future__ import annotations

from orchestration import tool


@tool("bench/add")
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b
