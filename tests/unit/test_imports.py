"""The house's walls: who may import what. A failure prints the picture that was broken."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Which of our packages each may import.
ROOMS = {"orchestration": {"orchestration"}, "workers": {"orchestration", "workers"}, "gateway": {"orchestration", "gateway"}}

#: Which folders may import each outside system.
OUTSIDE = {
    "celery": {"orchestration/queue", "workers"},
    "kombu": {"orchestration/queue", "workers"},
    "redis": {"orchestration/state", "orchestration/testing"},
    "zenoh": {"orchestration/mesh", "workers/tool_host"},
    "httpx": {"orchestration/models", "orchestration/clients", "orchestration/outbound", "orchestration/testing"},
    "fastapi": {"gateway"},
    "starlette": {"gateway"},
}

#: Inside orchestration: what each room must not know.
CORE_KNOWS = {"orchestration.core"}

PICTURE = """
    gateway  ->  orchestration  <-  workers
    inside orchestration:  state, mesh, models, queue  ->  core  <-  steps, actions;   wiring knows both sides
    celery: queue, workers   redis: state   zenoh: mesh, tool host   httpx: models, clients, outbound   fastapi: gateway
"""


def imports(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.append((node.lineno, node.module))
    return found


def test_imports_run_one_way() -> None:
    broken = []
    for package, allowed in ROOMS.items():
        for path in sorted((ROOT / package).rglob("*.py")):
            place = path.relative_to(ROOT)
            for line, module in imports(path):
                top = module.split(".")[0]
                if top in ROOMS and top not in allowed:
                    broken.append(f"{place}:{line} imports {module}")
                if top in OUTSIDE and not any(str(place).startswith(f"{folder}/") for folder in OUTSIDE[top]):
                    broken.append(f"{place}:{line} imports {module}")
                if str(place).startswith("orchestration/core/") and top == "orchestration" and not module.startswith("orchestration.core"):
                    broken.append(f"{place}:{line}: the core imports {module}")
    assert not broken, PICTURE + "\n".join(broken)


def test_no_file_outgrows_a_mind() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {count} lines"
        for package in ROOMS
        for path in sorted((ROOT / package).rglob("*.py"))
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > 400
    ]
    assert not long, long
