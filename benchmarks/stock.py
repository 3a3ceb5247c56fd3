"""A Celery app on its own settings: no journal, and a transport that keeps books of what is not acknowledged. To compare with."""

from __future__ import annotations

import os

from celery import Celery

_redis_url = os.environ.get("TURNMILL_REDIS_URL", "redis://127.0.0.1:6379/0")

app = Celery("stock", broker=_redis_url, backend=_redis_url, include=["benchmarks.agents"])
app.conf.task_default_queue = "stock"
