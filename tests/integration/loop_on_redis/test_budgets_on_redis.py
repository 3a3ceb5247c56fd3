"""`tests/unit/test_loop_budgets.py` on a real server."""

from tests.unit.test_loop_budgets import *  # noqa: F403
