"""The Celery side. `celery -A workers` finds the app here; importing `workers.tasks` alone makes no app, so that a
host's own stays the current one."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "celery":
        from workers.app import app

        return app
    raise AttributeError(name)
