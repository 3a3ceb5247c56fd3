"""A step's task as the bytes that kombu would put on its Redis list, so that the script that commits a step can ring the bell itself.

Where broker and state are one Redis, and nobody listens to Celery's publishing signals, this saves a round trip and most
of a publish's CPU for each link, and there is no instant between a commit and its message. The form is kombu's own: a
sample is prepared by it once for each task name, and only what differs is replaced.
"""

from __future__ import annotations

import base64
import copy
import json
import re
import uuid
from typing import Any

from celery import Celery

from orchestration.core.ids import StepId
from orchestration.core.safe_json import dumps
from orchestration.queue.names import TASKS, arguments

#: What stands in a sample for each value that differs from message to message.
_PLACES = {name: f"@turnmill-{name}@" for name in ("id", "root", "parent", "args", "tag", "body")}
_PLACE = re.compile('"@turnmill-([a-z]+)@"')


class Envelopes:
    """Makes messages for one app. `queue` is the name of the broker's queue."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._samples: dict[tuple[str, str], tuple[list[str], str]] = {}

    def message(self, step: StepId, queue: str) -> str:
        """The message of a step outside any chord, ready to be pushed."""
        name = TASKS[step.kind]
        sample = self._samples.get((name, queue))
        if sample is None:
            sample = self._samples[name, queue] = self._sample(name, queue)
        parts, rest = sample
        args = arguments(step)
        values = {
            "id": dumps(step.task_id),
            "root": dumps(step.root_task_id),
            "parent": dumps(step.parent_task_id),
            "args": dumps(repr(tuple(args))),
            "tag": f'"{uuid.uuid4()}"',
            "body": f'"{base64.b64encode(f"[{dumps(args)}{rest}".encode()).decode()}"',
        }
        # text and names of values take turns
        return "".join(values[part] if number % 2 else part for number, part in enumerate(parts))

    def _sample(self, name: str, queue: str) -> tuple[list[str], str]:
        """A message of this task as kombu prepares it, cut at what differs; and what its body has behind the arguments."""
        headers, properties, body, _ = self._app.amqp.as_task_v2("sample", name, [], {}, kwargsrepr="{}", ignore_result=True)
        with self._app.producer_or_acquire() as producer:
            encoded, content_type, encoding = producer._prepare(body, "json", None, None, None, headers)
            channel = producer.channel
            message = channel.prepare_message(
                encoded, None, content_type, encoding, headers, copy.deepcopy(properties) | {"delivery_mode": 2}
            )
            channel._inplace_augment_message(message, "", queue)
        if message["properties"]["body_encoding"] != "base64":
            raise ValueError("an encoding of the body that is not known here")
        kwargs_and_embed = json.loads(base64.b64decode(message["body"]))[1:]
        places = {"id": _PLACES["id"], "root_id": _PLACES["root"], "parent_id": _PLACES["parent"], "argsrepr": _PLACES["args"]}
        filled: dict[str, Any] = message | {
            "body": _PLACES["body"],
            "headers": message["headers"] | places,
            "properties": message["properties"] | {"correlation_id": _PLACES["id"], "delivery_tag": _PLACES["tag"]},
        }
        return _PLACE.split(json.dumps(filled)), "".join(f",{json.dumps(part)}" for part in kwargs_and_embed) + "]"
