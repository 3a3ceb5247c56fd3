"""`tests/unit/test_loop_tools.py` on a real server."""

from tests.unit.test_loop_tools import *  # noqa: F403
