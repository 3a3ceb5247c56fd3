"""`tests/unit/test_loop_output.py` on a real server."""

from tests.unit.test_loop_output import *  # noqa: F403
