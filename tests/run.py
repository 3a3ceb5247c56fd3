"""All tests: those with whole deployments in three processes, all others in a fourth one beside them, then the chaos run.

Deployments wait more than they work (for leases to end, for processes to start), so a few at a time and the quicker tests fill one
another's pauses. The chaos run has the machine for itself. Its trouble is another each time: it prints its seed, and
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

#: Files of tests/crash that run in a process of their own; all other deployments run in a third one. About as long each.
SHARES = (
    ("bounds", "chords", "gated_calls", "given_up", "zombies"),
    ("doorbell", "endings", "killed_workers", "leftovers", "model_limits"),
)

PYTEST = [sys.executable, "-m", "pytest"]


def main(arguments: list[str]) -> int:
    """Run all; the reports come one after the other, each in one piece, the last side's as it is made."""
    if arguments:
        return _side_by_side([["-m", "not slow", *arguments], ["-m", "slow", *arguments]])
    shares = [[f"tests/crash/test_{name}.py" for name in share] for share in SHARES]
    missing = [name for share in shares for name in share if not Path(name).exists()]
    if missing:
        print(f"tests/run.py: no such file: {', '.join(missing)}", file=sys.stderr)
        return 2
    others = ["tests", *(f"--ignore={name}" for name in ("tests/chaos", *(name for share in shares for name in share)))]
    status = _side_by_side([["-m", "not slow"], *(["-m", "slow", *share] for share in [*shares, others])])
    seconds = os.environ.get("TURNMILL_CHAOS_S") or CHAOS_S
    if float(seconds) > 0:
        chaos = subprocess.run([*PYTEST, "tests/chaos"], env=os.environ | {"TURNMILL_CHAOS_S": seconds}, check=False)
        status = status or chaos.returncode
    return status


def _side_by_side(choices: list[list[str]]) -> int:
    """Run pytest with each of `choices`; the status of the first that is not good, or 0."""
    sides = []
    for choice in choices:
        report = None if choice is choices[-1] else tempfile.TemporaryFile()  # noqa: SIM115
        sides.append((subprocess.Popen([*PYTEST, *choice], stdout=report, stderr=report and subprocess.STDOUT), report))
    statuses = []
    for side, report in sides:
        statuses.append(side.wait())
        if report is not None:
            report.seek(0)
            sys.stdout.write("\n" + report.read().decode(errors="replace"))
            sys.stdout.flush()
            report.close()
    return next((status for status in statuses if status not in GOOD), 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
