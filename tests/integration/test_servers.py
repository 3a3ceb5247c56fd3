"""Servers that tests start are real, theirs alone, and gone with them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from orchestration.core.errors import Misconfigured
from orchestration.testing.parts import NotReady, Part, answers_tcp, wait_until
from orchestration.testing.servers import RedisServer, free_port, redis_server, server_binary


@contextlib.contextmanager
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with contextlib.closing(redis.Redis.from_url(server.url, decode_responses=True)) as connected:
        yield connected


def test_a_server_of_ours_listens_on_loopback_and_evicts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TURNMILL_REDIS_URL", raising=False)
    with redis_server() as server, client(server) as redis_client:
        assert redis_client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
        assert redis_client.config_get("bind")["bind"] == "127.0.0.1"
        assert redis_client.info("server")["process_id"] == server.pid
    assert not answers_tcp(int(server.url.rsplit(":", 1)[1].split("/")[0]))


@pytest.mark.parametrize(("policy", "fsync"), [("off", None), ("everysec", "everysec"), ("always", "always")])
def test_the_disk_policy_is_the_one_asked_for(policy: str, fsync: str | None) -> None:
    with RedisServer(appendonly=policy) as server, client(server) as redis_client:  # type: ignore[arg-type]
        assert redis_client.config_get("appendonly")["appendonly"] == ("yes" if fsync else "no")
        if fsync:
            assert redis_client.config_get("appendfsync")["appendfsync"] == fsync


def test_what_was_written_survives_restart_and_kill_at_the_same_address() -> None:
    with RedisServer(appendonly="always") as server:
        with client(server) as redis_client:
            redis_client.set("kept", "1")
        url, first = server.url, server.pid
        server.restart()
        with client(server) as redis_client:
            redis_client.set("kept too", "2")
        server.kill()
        server.start()
        assert server.url == url and server.pid != first
        with client(server) as redis_client:
            assert redis_client.mget("kept", "kept too") == ["1", "2"]


def test_a_configured_server_that_does_not_answer_is_no_reason_to_take_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TURNMILL_TEST_REDIS", raising=False)
    monkeypatch.setenv("TURNMILL_REDIS_URL", f"redis://:s3cret@127.0.0.1:{free_port()}/0")
    with pytest.raises(Misconfigured, match="TURNMILL_REDIS_URL") as refused, redis_server():
        pass
    assert "s3cret" not in str(refused.value)


def test_a_configured_server_is_used_and_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisServer() as somebodys:
        monkeypatch.delenv("TURNMILL_TEST_REDIS", raising=False)
        monkeypatch.setenv("TURNMILL_REDIS_URL", somebodys.url)
        with redis_server() as server:
            assert server.url == somebodys.url
            with pytest.raises(RuntimeError, match="not ours"):
                server.kill()
        with client(somebodys) as redis_client:
            assert redis_client.ping()


def test_what_answers_but_is_no_redis_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TURNMILL_TEST_REDIS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            connection, _ = listener.accept()
            connection.recv(100)
            connection.close()

        threading.Thread(target=hang_up, daemon=True).start()
        monkeypatch.setenv("TURNMILL_REDIS_URL", f"redis://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(Misconfigured, match="TURNMILL_REDIS_URL"), redis_server():
            pass
    monkeypatch.setenv("TURNMILL_REDIS_URL", "http://somewhere")
    with pytest.raises(Misconfigured, match="expected redis://"), redis_server():
        pass


def test_the_binary_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNMILL_TEST_REDIS", "embedded")
    assert server_binary().name == "valkey-server"
    monkeypatch.setenv("TURNMILL_TEST_REDIS", "another")
    with pytest.raises(Misconfigured, match="'embedded' or 'system'"):
        server_binary()
    monkeypatch.setenv("TURNMILL_TEST_REDIS", "system")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Misconfigured, match="PATH"):
        server_binary()


PARENT = """
import os, subprocess, sys, time
from pathlib import Path
from orchestration.testing.parts import Part
from orchestration.testing.servers import RedisServer
directory = Path(sys.argv[1])
server = RedisServer().start()
command = ["/bin/sh", "-c", "sleep 600 & echo $!; wait"]
part = Part("family", command, env=os.environ, cwd=directory, log=directory / "log", ready=lambda log: log.endswith("\\n"))
part.start().wait_ready()
if os.fork() == 0:
    time.sleep(600)  # a forked child that does not know better must not keep anything alive
print(server.pid, part.pid, part.log().strip(), server._directory, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_a_parent_that_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    with parent.stdout as output:
        *pids, directory = output.readline().split()
    parent.send_signal(number)
    parent.wait()
    try:
        wait_until(lambda: not any(lives(int(pid)) for pid in pids), "server, child and grandchild are gone")
        wait_until(lambda: not Path(directory).exists(), "the server's directory is gone")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)  # the forked child


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # in a container nobody may collect the dead
    except psutil.NoSuchProcess:
        return False


def test_a_process_that_ends_too_early_shows_the_end_of_its_log(tmp_path: Path) -> None:
    command = ["/bin/sh", "-c", "echo cannot open the till; exit 3"]
    part = Part("till", command, env=os.environ, cwd=tmp_path, log=tmp_path / "log", ready=lambda log: "open" in log and "till is" in log)
    with pytest.raises(NotReady, match=r"(?s)till ended with status 3.*cannot open the till"):
        part.start().wait_ready()


def test_a_paused_process_can_be_stopped(tmp_path: Path) -> None:
    # no shell that keeps forking: one that is stopped in the middle of a fork never shows as stopped
    command = ["/bin/sh", "-c", "echo up; exec sleep 1000"]
    part = Part("idle", command, env=os.environ, cwd=tmp_path, log=tmp_path / "log", ready=lambda log: "up" in log).start().wait_ready()
    part.pause()
    wait_until(lambda: psutil.Process(part.pid).status() == psutil.STATUS_STOPPED, "it is stopped")
    assert part.stop() == -signal.SIGTERM
    assert not part.running
    part.start().wait_ready()
    part.kill()
    assert part.status == -signal.SIGKILL
