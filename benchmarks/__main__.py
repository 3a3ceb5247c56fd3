"""`make bench`: what a user waits for, each part beside something to compare it with from the same run.

`benchmarks.approvals`, `benchmarks.gateway` and `benchmarks.keeping` take longer or more memory and are run by hand.
"""

from __future__ import annotations

import subprocess
import sys

#: The parts, each a process of its own: what one leaves behind must not weigh on the next.
PARTS = ("benchmarks.turns", "benchmarks.recovery", "benchmarks.over_http")


def main() -> int:
    """Run the parts one after the other; returns the exit status of the first that failed."""
    for part in PARTS:
        print(f"\n=== python -m {part}", flush=True)
        status = subprocess.run([sys.executable, "-m", part], check=False).returncode
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
