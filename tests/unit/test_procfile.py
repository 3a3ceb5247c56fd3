"""A Procfile is read line by line, and a wrong one is refused with the line's number."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestration.core.errors import Misconfigured
from workers.dev import read_procfile


def test_comments_and_empty_lines_are_no_processes(tmp_path: Path) -> None:
    file = tmp_path / "Procfile"
    file.write_text("# ours\n\nweb: serve --port ${PORT:-80}\n  worker-2:   work: hard  \n")
    assert read_procfile(file) == {"web": "serve --port ${PORT:-80}", "worker-2": "work: hard"}


@pytest.mark.parametrize("text", ["web serve\n", "web: a\nweb: b\n", "web:\n", "# nothing\n", ""])
def test_a_broken_procfile_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "Procfile"
    file.write_text(text)
    with pytest.raises(Misconfigured, match="Procfile"):
        read_procfile(file)


def test_a_missing_procfile_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="--procfile"):
        read_procfile(tmp_path / "Procfile")
