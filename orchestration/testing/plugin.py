"""The pytest plugin: real servers and real processes as fixtures, for Turnmill's own tests and those of its users.

It imports nothing of weight until a fixture is asked for, since pytest loads it in every run of an environment that has Turnmill.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from orchestration.testing.local import LocalTurnmill
    from orchestration.testing.servers import RedisServer
    from orchestration.testing.stack import Stack


_STARTED: pytest.StashKey[list[Stack]] = pytest.StashKey()


@pytest.fixture(scope="session")
def turnmill_redis() -> Iterator[RedisServer]:
    """A real Redis server for the whole test run; `.url` is its address. See `orchestration.testing.servers.redis_server`."""
    from orchestration.testing.servers import redis_server

    with redis_server() as server:
        yield server


@pytest.fixture
def turnmill() -> Callable[..., LocalTurnmill]:
    """Makes a whole Turnmill in the test process, without any service: `here = turnmill(Agent(…), add); here.ask("support", "hi")`.

    It takes what `LocalTurnmill` takes: agents, tools and webhooks, then settings by name.
    """
    from orchestration.testing.local import LocalTurnmill

    return LocalTurnmill


@pytest.fixture
def turnmill_stack(request: pytest.FixtureRequest) -> Iterator[Callable[..., Stack]]:
    """Starts deployments of real processes that end with the test: `stack = turnmill_stack(agents="shop.agents", tools=["shop.tools"])`.

    It takes what `Stack` takes. When the test fails, the ends of the processes' logs are part of its report.
    """
    from orchestration.testing.stack import Stack

    started = request.node.stash[_STARTED] = []

    def start(**options: Any) -> Stack:
        stack = Stack(**options)
        started.append(stack)
        return stack.start()

    yield start
    for stack in reversed(started):
        stack.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Put the ends of the logs into the report of a test that failed."""
    report = yield
    if call.when == "call" and report.failed:
        report.sections.extend(("turnmill logs", stack.logs()) for stack in item.stash.get(_STARTED, []))
    return report
