"""The `turnmill` command as a user types it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestration.testing.servers import RedisServer, free_port


def turnmill(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = Path(sys.executable).parent / "turnmill"
    return subprocess.run([command, *words], env={**os.environ, **env}, capture_output=True, text=True, timeout=100, check=False)


def test_a_key_is_made_listed_and_revoked(turnmill_redis: RedisServer) -> None:
    at = turnmill_redis.url
    scopes = ["--scope", "turns:write", "--scope", "turns:read"]
    made = turnmill("keys", "create", "--sub", "[alice]", "--tenant", "acme", *scopes, "--role", "lead", TURNMILL_REDIS_URL=at)
    assert made.returncode == 0, made.stderr
    key = made.stdout.strip()
    assert key.startswith("tmk_")
    key_id = made.stderr.split()[0]

    listed = turnmill("keys", "list", TURNMILL_REDIS_URL=at)
    assert key_id in listed.stdout and "[alice]" in listed.stdout and key not in listed.stdout

    assert turnmill("keys", "revoke", key_id, TURNMILL_REDIS_URL=at).returncode == 0
    assert key_id not in turnmill("keys", "list", TURNMILL_REDIS_URL=at).stdout
    again = turnmill("keys", "revoke", key_id, TURNMILL_REDIS_URL=at)
    assert again.returncode == 2 and "no key" in again.stderr


@pytest.mark.parametrize(
    ("words", "env", "told"),
    [
        (["keys", "list"], {"TURNMILL_LEASE_S": "soon"}, "TURNMILL_LEASE_S"),
        (["keys", "create", "--sub", "a", "--tenant", "b", "--scope", "everything"], {}, "scope"),
        (["dev", "--procfile", "none-here"], {}, "none-here"),
        (["dev"], {"TURNMILL_AGENTS": "no.such.module"}, "no.such.module"),
    ],
)
def test_what_must_be_mended_is_one_line_and_status_2(words: list[str], env: dict[str, str], told: str) -> None:
    wrong = turnmill(*words, **env)
    assert wrong.returncode == 2
    assert told in wrong.stderr
    assert len(wrong.stderr.strip().splitlines()) == 1


def test_a_store_that_is_away_is_one_line_and_status_1() -> None:
    away = turnmill("keys", "list", TURNMILL_REDIS_URL=f"redis://:s3cret@127.0.0.1:{free_port()}/0")
    assert away.returncode == 1
    assert len(away.stderr.strip().splitlines()) == 1 and "s3cret" not in away.stderr


def test_the_version_is_told() -> None:
    assert turnmill("version").stdout.startswith("turnmill 0.")
