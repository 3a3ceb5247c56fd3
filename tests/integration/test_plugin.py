"""The pytest plugin, as a user's own test run has it."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]


def test_the_fixtures_are_there_without_any_import(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        def test_real(turnmill_redis):
            assert turnmill_redis.url.startswith("redis://127.0.0.1:")
        """
    )
    pytester.runpytest_subprocess("-q").assert_outcomes(passed=1)


def test_a_run_that_uses_no_fixture_pays_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_lean():
            assert not {"redis", "celery", "zenoh", "orchestration.testing.stack", "orchestration.testing.servers"} & set(sys.modules)
        """
    )
    pytester.runpytest_subprocess("-q").assert_outcomes(passed=1)


def test_a_failing_test_shows_the_logs_of_its_processes(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        def test_wrong(turnmill_stack):
            stack = turnmill_stack(processes=["mesh"])
            assert stack["mesh"].running
            assert not stack["mesh"].running
        """
    )
    result = pytester.runpytest_subprocess("-q")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*turnmill logs*", "*mesh (the end of its log)*"])
