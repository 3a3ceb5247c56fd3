"""`tests/unit/test_loop_model_limits.py` on a real server."""

from tests.unit.test_loop_model_limits import *  # noqa: F403
