"""All tests: those with whole deployments in two processes, all others in a third one beside them, then the chaos run.

Deployments wait more than they work (for leases to end, for processes to start), so two of them at a time and the quicker tests fill
one another's pauses. The chaos run has the machine for itself. Its trouble is another each time: it prints its seed, and
`TURNMILL_CHAOS_SEED` and `TURNMILL_CHAOS_S` repeat one; `TURNMILL_CHAOS_S=0` leaves it out. Arguments choose among the tests and are
handed to pytest as they are; with any, there is no chaos run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

#: pytest's own statuses that count as good: passed, and none selected (a choice of files may leave one side empty).
GOOD = (0, 5)

#: For how long the chaos run breaks things, in seconds; with its start and its end it takes twice as long.
CHAOS_S = "30"

#: Files of tests/crash that run in one process; all other deployments run in the other. About half of the time each.
FIRST_HALF = ("bounds", "chords", "doorbell", "endings", "gated_calls", "zombies", "given_up")

PYTEST = [sys.executable, "-m", "pytest"]


def main(arguments: list[str]) -> int:
    """Run all; the reports come one after the other, each in one piece, the last side's as it is made."""
    if arguments:
        return _first_bad([subprocess.run([*PYTEST, *arguments], check=False).returncode])
    first = [f"tests/crash/test_{name}.py" for name in FIRST_HALF]
    missing = [name for name in first if not Path(name).exists()]
    if missing:
        print(f"tests/run.py: no such file: {', '.join(missing)}", file=sys.stderr)
        return 2
    others = [f"--ignore={name}" for name in ("tests/chaos", *first)]
    with tempfile.TemporaryFile() as quick_report, tempfile.TemporaryFile() as first_report:
        quick = subprocess.Popen([*PYTEST, "-m", "not slow"], stdout=quick_report, stderr=subprocess.STDOUT)
        one = subprocess.Popen([*PYTEST, "-m", "slow", *first], stdout=first_report, stderr=subprocess.STDOUT)
        two = subprocess.Popen([*PYTEST, "-m", "slow", *others])
        statuses = []
        for side, report in ((quick, quick_report), (one, first_report)):
            statuses.append(side.wait())
            report.seek(0)
            sys.stdout.write("\n" + report.read().decode(errors="replace"))
            sys.stdout.flush()
        statuses.append(two.wait())
    seconds = os.environ.get("TURNMILL_CHAOS_S") or CHAOS_S
    if float(seconds) > 0:
        statuses.append(subprocess.run([*PYTEST, "tests/chaos"], env=os.environ | {"TURNMILL_CHAOS_S": seconds}, check=False).returncode)
    return _first_bad(statuses)


def _first_bad(statuses: list[int]) -> int:
    return next((status for status in statuses if status not in GOOD), 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
