"""`tests/unit/test_loop_nested.py` on a real server."""

from tests.unit.test_loop_nested import *  # noqa: F403
