"""`tests/unit/test_loop_handoffs.py` on a real server."""

from tests.unit.test_loop_handoffs import *  # noqa: F403
