"""`tests/unit/test_loop_compaction.py` on a real server."""

from tests.unit.test_loop_compaction import *  # noqa: F403
