"""A tool's result as the text that a model reads, whatever kind of value the tool gave back."""

from __future__ import annotations

from typing import Any

from orchestration.core.safe_json import as_text, clean_text


def result_text(value: Any) -> str:
    """Text as it is; the blocks of an MCP result that holds nothing but text, a line each; everything else as JSON.

    Bytes are described, not dumped; what JSON cannot carry is made text (see `core/safe_json.py`).
    """
    blocks = value.get("content") if isinstance(value, dict) and len(value) == 1 else None
    if isinstance(blocks, list) and all(_is_text(block) for block in blocks):
        texts = [block["text"] for block in blocks if block["text"]]
        if texts:
            return clean_text("\n".join(texts))
    return as_text(value)


def _is_text(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str)
