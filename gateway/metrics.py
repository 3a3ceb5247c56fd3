"""What a gateway process counts, for Prometheus: answers by route, watchers, channels, deliveries. No tenant and no id is a label.

Each process counts for itself; a scrape of all replicas adds up.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

router = APIRouter(tags=["running"])

#: Upper bounds of the buckets for the time of an answer, in seconds.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Meters:
    """The meters of one process. `watch` names what is read when somebody scrapes."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "turnmill_gateway_requests", "answers by route and status", ["method", "route", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "turnmill_gateway_answer_seconds",
            "time until an answer began (a stream's first byte), by route",
            ["method", "route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.frames = Counter(
            "turnmill_gateway_frames_sent", "frames written to watchers, by transport", ["transport"], registry=self.registry
        )
        self.cut_off = Counter("turnmill_gateway_watchers_cut_off", "watchers that fell behind and were cut off", registry=self.registry)
        self.deliveries = Counter(
            "turnmill_gateway_webhook_deliveries",
            "webhook deliveries by webhook and what came of them",
            ["webhook", "outcome"],
            registry=self.registry,
        )
        self.channels = Gauge("turnmill_gateway_channels", "open channels", registry=self.registry)

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Show what `value` gives whenever somebody scrapes."""
        Gauge(name, text, registry=self.registry).set_function(value)


@router.get("/metrics", summary="Metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def metrics(request: Request) -> Response:
    """What this process counts, in Prometheus' text format."""
    meters: Meters = request.app.state.parts.meters
    return Response(generate_latest(meters.registry), media_type=CONTENT_TYPE_LATEST)
