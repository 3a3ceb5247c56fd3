"""Makes `docs/settings.md` from the settings class, so that the page cannot say something else. `make docs` runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from orchestration.settings import Settings

PAGE = Path(__file__).parent / "settings.md"

HEAD = """# Settings

Made from `orchestration/settings.py` by `make docs`; change it there.

Each is an environment variable, read once when a process starts. Every default serves development on one machine. A wrong value is
refused at start: one line names the setting and what was expected, and never shows the value. An empty variable counts as set.

| setting | takes | default | means |
|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    rows = [_row(name, field) for name, field in Settings.model_fields.items()]
    return HEAD + "\n".join(rows) + "\n"


def _row(name: str, field: FieldInfo) -> str:
    default = field.default.get_secret_value() if isinstance(field.default, SecretStr) else field.default
    shown = f"`{default:g}`" if isinstance(default, float) else f"`{default}`" if default not in ("", ()) else "none"
    text = (field.description or "").replace("|", "\\|")
    return f"| `TURNMILL_{name.upper()}` | {_takes(field)} | {shown} | {text} |"


def _takes(field: FieldInfo) -> str:
    kind: Any = field.annotation
    if get_origin(kind) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(kind))
    named = {str: "text", int: "whole number", float: "number", SecretStr: "text, secret", bool: "true or false"}.get(
        kind, "comma-separated list"
    )
    bounds = []
    for rule in field.metadata:
        for sign, attribute in ((">", "gt"), ("≥", "ge"), ("<", "lt"), ("≤", "le")):
            bound = getattr(rule, attribute, None)
            if bound is not None:
                bounds.append(f"{sign} {bound:g}")
    return ", ".join([named, *bounds])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
