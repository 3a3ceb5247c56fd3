"""What all tests share: a known environment, and no silent skip where that was asked for. The fixtures are the plugin's."""

from __future__ import annotations

import os

import pytest

#: Settings of the shell that a test run honours: which Redis server to use, and the chaos run's seed and length.
KEPT = {"TURNMILL_REDIS_URL", "TURNMILL_TEST_REDIS", "TURNMILL_FAIL_ON_SKIP", "TURNMILL_CHAOS_SEED", "TURNMILL_CHAOS_S"}

#: Folders whose tests start whole deployments.
DEPLOYMENTS = {"acceptance", "crash", "chaos"}

for _name in [name for name in os.environ if name.startswith("TURNMILL_") and name not in KEPT]:
    del os.environ[_name]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Whatever starts a whole deployment is slow, said or not; `tests/run.py` goes by it."""
    if DEPLOYMENTS & set(item.path.relative_to(item.config.rootpath).parts):
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """With TURNMILL_FAIL_ON_SKIP a run with a skipped or an expectedly failing test fails: the CI machine has all that tests need."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not os.environ.get("TURNMILL_FAIL_ON_SKIP") or reporter is None:
        return
    skipped = [*reporter.stats.get("skipped", []), *reporter.stats.get("xfailed", [])]
    if skipped and session.exitstatus == 0:
        reporter.write_line(f"{len(skipped)} tests were skipped, which counts as a failure here", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
