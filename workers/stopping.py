"""SIGTERM and SIGINT as something to wait for, for processes that run until they are told to stop."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class StopSignal:
    """Catches the two signals from now on; must be made in the main thread. The second one ends the process at once."""

    def __init__(self) -> None:
        self._told = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._tell)

    def wait(self) -> None:
        """Return once the process was told to stop."""
        while not self._told.wait(1.0):
            pass

    def _tell(self, number: int, frame: FrameType | None) -> None:
        self._told.set()
        signal.signal(number, signal.SIG_DFL)
