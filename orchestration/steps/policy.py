"""An agent's policy as a step asks it: a function of the user's that may raise, or hang, and must not keep a worker's thread for ever."""

from __future__ import annotations

import logging
import threading
from contextvars import copy_context

from orchestration.core.policy import Allow, Policy, PolicyCall, PolicyFailed, Verdict, verdict_of

log = logging.getLogger("turnmill.steps")

#: How long a policy may take, in seconds. After that it counts as failed, though it may go on.
LIMIT_S = 30.0

#: Policies that may hang at a time in this process before no further one is asked.
MAX_HANGING = 16

_lock = threading.Lock()
_hanging = 0


def verdict_in_time(policy: Policy | None, call: PolicyCall) -> Verdict | PolicyFailed:
    """What `policy` says of `call`, within `LIMIT_S`. Never raises; why there is no verdict is logged, without the call's arguments."""
    if policy is None:
        return Allow()
    said = _bounded(policy, call)
    if isinstance(said, PolicyFailed):
        log.warning("the policy of agent %s gave no verdict about %s: %s", call.agent, call.prefix or call.name, said.why)
    return said


def _bounded(policy: Policy, call: PolicyCall) -> Verdict | PolicyFailed:
    global _hanging
    if _hanging >= MAX_HANGING:
        return PolicyFailed(f"{_hanging} earlier ones hang")
    said: list[Verdict | PolicyFailed] = []
    ended, left = threading.Event(), False
    context = copy_context()

    def run() -> None:
        global _hanging
        try:
            said.append(context.run(verdict_of, policy, call))
        finally:
            with _lock:
                ended.set()
                if left:
                    _hanging -= 1

    threading.Thread(target=run, name="turnmill-policy", daemon=True).start()
    if not ended.wait(LIMIT_S):
        with _lock:
            if not ended.is_set():
                left = True
                _hanging += 1
    if left:
        return PolicyFailed(f"no answer within {LIMIT_S:.0f} s")
    return said[0] if said else PolicyFailed("its thread was ended")
