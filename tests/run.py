"""All tests, in two processes side by side: those with whole deployments one after the other in one, all others in the second.

What the first say of leases and silence would not hold on a machine that is busy with their like; the others fill the time
in which they wait. The chaos run, whose trouble is another each time, is `make chaos`. Arguments are handed to both.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

#: pytest's own statuses that count as good: passed, and none selected (a choice of files may leave one side empty).
GOOD = (0, 5)


def main(arguments: list[str]) -> int:
    """Run both; the quicker side's report comes first in one piece, the other one's as it is made."""
    pytest = [sys.executable, "-m", "pytest"]
    with tempfile.TemporaryFile() as report:
        others = subprocess.Popen([*pytest, "-m", "not slow", *arguments], stdout=report, stderr=subprocess.STDOUT)
        deployments = subprocess.Popen([*pytest, "-m", "slow", "--ignore=tests/chaos", *arguments])
        statuses = [others.wait()]
        report.seek(0)
        sys.stdout.write("\n" + report.read().decode(errors="replace"))
        sys.stdout.flush()
        statuses.append(deployments.wait())
    return next((status for status in statuses if status not in GOOD), 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
