"""All tests: those with whole deployments one after the other in one process, all others in a second one beside it, then the chaos run.

What the first say of leases and silence would not hold on a machine that is busy with their like; the others fill the time
in which they wait. The chaos run has the machine for itself. Its trouble is another each time: it prints its seed, and
`TURNMILL_CHAOS_SEED` and `TURNMILL_CHAOS_S` repeat one; `TURNMILL_CHAOS_S=0` leaves it out. Arguments choose among the tests and are
handed to the first two; with any, there is no chaos run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

#: pytest's own statuses that count as good: passed, and none selected (a choice of files may leave one side empty).
GOOD = (0, 5)

#: For how long the chaos run breaks things, in seconds; with its start and its end it takes twice as long.
CHAOS_S = "30"


def main(arguments: list[str]) -> int:
    """Run all; the quicker side's report comes first in one piece, the others' as they are made."""
    pytest = [sys.executable, "-m", "pytest"]
    with tempfile.TemporaryFile() as report:
        others = subprocess.Popen([*pytest, "-m", "not slow", *arguments], stdout=report, stderr=subprocess.STDOUT)
        deployments = subprocess.Popen([*pytest, "-m", "slow", "--ignore=tests/chaos", *arguments])
        statuses = [others.wait()]
        report.seek(0)
        sys.stdout.write("\n" + report.read().decode(errors="replace"))
        sys.stdout.flush()
        statuses.append(deployments.wait())
    seconds = os.environ.get("TURNMILL_CHAOS_S") or CHAOS_S
    if not arguments and float(seconds) > 0:
        statuses.append(subprocess.run([*pytest, "tests/chaos"], env=os.environ | {"TURNMILL_CHAOS_S": seconds}, check=False).returncode)
    return next((status for status in statuses if status not in GOOD), 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
