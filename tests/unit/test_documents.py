"""The documents say what the code does, as far as a machine can compare the two."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.settings_page import PAGE, page
from orchestration.core.call import CallState
from orchestration.core.turn import FOLLOWS, TurnState
from orchestration.settings import Settings
from workers.dev import RELOADED, read_procfile

ROOT = Path(__file__).resolve().parents[2]

STATES = (ROOT / "docs/states.md").read_text(encoding="utf-8")


def diagram(heading: str) -> dict[str, set[str]]:
    drawn: dict[str, set[str]] = {}
    section = STATES.split(f"## {heading}")[1].split("```")[1]
    for source, target in re.findall(r"(\w+) --> (\w+)", section):
        drawn.setdefault(source, set()).add(target)
    return drawn


def test_the_settings_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs`"
    for name in Settings.model_fields:
        assert f"`TURNMILL_{name.upper()}`" in page()


def test_the_drawing_of_a_turn_is_the_table_of_the_code() -> None:
    assert diagram("A turn") == {str(state): {str(after) for after in following} for state, following in FOLLOWS.items() if following}
    for state in TurnState:
        assert f"| `{state}` |" in STATES


def test_the_drawing_of_a_call_has_its_states() -> None:
    drawn = diagram("A tool call")
    assert set(drawn) | set().union(*drawn.values()) == {str(state) for state in CallState}


def test_help_prints_every_target_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (declared,) = re.findall(r"^\.PHONY: (.+)$", makefile, re.M)
    assert set(re.findall(r"^([a-z-]+):.*## ", makefile, re.M)) == set(declared.split())


def test_the_procfile_has_a_line_for_each_process() -> None:
    commands = read_procfile(ROOT / "Procfile")
    assert set(commands) == {"mesh", "tools", "worker", "control", "gateway", "beat", "flower"}
    assert set(RELOADED) <= set(commands)


@pytest.mark.parametrize("document", ["README.md", "docs/deploy.md"])
def test_the_documented_commands_are_those_of_the_procfile(document: str) -> None:
    commands = [set(command.split()) for command in read_procfile(ROOT / "Procfile").values()]
    text = (ROOT / document).read_text(encoding="utf-8")
    documented = list(re.findall(r"^\| [A-Za-z ]+ \| `([^`]+)`", text, re.M))
    assert len(documented) == len(commands)
    for command in documented:
        words = [word for word in command.split() if not re.search(r"MODULE|yourshop|^\d|^--(host|port)$", word)]
        assert any(set(words) <= known for known in commands), command


def test_documents_link_to_files_that_are_there() -> None:
    for document in [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name}: {target}"
