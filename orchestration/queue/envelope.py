"""A step's task as the bytes that kombu would put on its Redis list, so that the script that commits a step can ring the bell itself.

Where broker and state are one Redis, and nobody listens to Celery's publishing signals, this saves a round trip and most
of a publish's CPU for each link, and there is no instant between a commit and its message. The form is kombu's own: a
sample is prepared by it once for each task name, and only what differs is replaced.
"""

from __future__ import annotations

import base64
import copy
import json
import uuid
from typing import Any

from celery import Celery

from orchestration.core.ids import StepId
from orchestration.queue.names import TASKS, arguments


class Envelopes:
    """Makes messages for one app. `queue` is the name of the broker's queue."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._samples: dict[tuple[str, str], dict[str, Any]] = {}

    def message(self, step: StepId, queue: str) -> str:
        """The message of a step outside any chord, ready to be pushed."""
        name = TASKS[step.kind]
        sample = self._samples.get((name, queue))
        if sample is None:
            sample = self._samples[name, queue] = self._sample(name, queue)
        args = arguments(step)
        task_id = step.task_id
        headers = sample["headers"] | {
            "id": task_id,
            "root_id": step.root_task_id,
            "parent_id": step.parent_task_id,
            "argsrepr": repr(tuple(args)),
        }
        properties = sample["properties"] | {"correlation_id": task_id, "delivery_tag": str(uuid.uuid4())}
        body = base64.b64encode(json.dumps([args, *sample["rest"]]).encode()).decode()
        return json.dumps(sample["message"] | {"body": body, "headers": headers, "properties": properties})

    def _sample(self, name: str, queue: str) -> dict[str, Any]:
        """A message of this task as kombu prepares it, taken apart."""
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
        rest = json.loads(base64.b64decode(message["body"]))[1:]
        return {"message": message, "headers": message["headers"], "properties": message["properties"], "rest": rest}
