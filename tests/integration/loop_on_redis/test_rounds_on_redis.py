"""`tests/unit/test_loop_rounds.py` on a real server."""

from tests.unit.test_loop_rounds import *  # noqa: F403
