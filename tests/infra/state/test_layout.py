"""Claims of infra/state/layout.py: services share a data folder and no file; what older releases kept is taken over."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.adapt.data.trace_store import TraceStore
from paceline.adapt.versions.registry import DrafterRegistry
from paceline.config import ServiceConfig
from paceline.errors import StateError
from paceline.infra.service.stores import StorePaths
from paceline.infra.state.desired import ensure_first_version
from paceline.infra.state.layout import adopt_state, prepare_home, snapshot_name
from paceline.infra.state.redis_clients import Keys
from paceline.paths import DECISIONS, service_home
from tests.helpers.drafters import make_trace
from tests.helpers.hosts import ledger, make_host, serve_and_stop, settle, stored


def served(url, client, keys, home, **config):
    """A controller of `home` that has decided and booked something and written its files."""
    ensure_first_version(client, keys, "v1", 10, 1.0)
    return serve_and_stop(make_host(url, keys, home.parent, data_dir=home, **config), client, keys)


def test_a_folder_that_hangs_keeps_nobody_who_asks_where_it_is(tmp_path, monkeypatch):
    folder = tmp_path / "there"

    def hanging(look):
        def call(path, *args, **options):
            assert not str(path).startswith(str(folder)), "the folder was looked at"
            return look(path, *args, **options)

        return call

    for name in ("stat", "lstat", "readlink"):
        monkeypatch.setattr(os, name, hanging(getattr(os, name)))
    paths = StorePaths.of(ServiceConfig(data_dir=str(folder)))
    DrafterRegistry(paths.registry), TraceStore(paths.traces)
    assert paths.home == folder / "services" / "paceline"


@pytest.mark.parametrize("name", ["paceline", "Qwen/Qwen3-8B", ".", "..", "redis", "a%2Fb", "../../etc"])
def test_every_name_has_a_folder_of_its_own_below_the_data_folder(tmp_path, name):
    home = service_home(tmp_path, name)
    assert home.parent == tmp_path / "services"
    assert home not in {service_home(tmp_path, n) for n in ("other", "a/b", "%2E", "%2E.")}
    assert StorePaths.of(ServiceConfig(data_dir=str(tmp_path))).home == service_home(tmp_path, "paceline")


def test_two_services_on_one_data_folder_know_nothing_of_each_other(shared_redis, client, keys, tmp_path):
    other = Keys(keys.model + "-b")
    served(shared_redis.url, client, keys, service_home(tmp_path, keys.model))
    served(shared_redis.url, client, other, service_home(tmp_path, other.model))
    alpha, beta = stored(client, keys), stored(client, other)
    assert (alpha.model, alpha.target_version, alpha.num_rows) == (keys.model, "t", 6)
    assert (beta.model, beta.target_version, beta.num_rows) == (other.model, "t", 6)
    for each in (keys, other):
        assert len(ledger(client, each, service_home(tmp_path, each.model))) == alpha.num_booked
    client.delete(other.state, other.epoch, other.desired, other.decisions, other.log)  # beta's Redis is lost
    home = service_home(tmp_path, other.model)
    again = make_host(shared_redis.url, other, tmp_path, data_dir=home)
    again.connect()
    assert again.session.state.num_rows == 6 and again.session.state.model == other.model


@pytest.mark.parametrize(("model", "target", "told"), [("other", "t", "model"), (None, "u", "target_version")])
def test_a_snapshot_of_another_service_is_refused_and_left_as_it_is(
    shared_redis, client, keys, tmp_path, model, target, told
):
    home = service_home(tmp_path, keys.model)
    served(shared_redis.url, client, keys, home)
    mine = keys if model is None else Keys(keys.model + model)
    for name in (mine.state, mine.epoch, mine.desired, mine.decisions, mine.log):
        client.delete(name)
    foreign = home / snapshot_name(target)
    if target != "t":
        (home / snapshot_name("t")).rename(foreign)
    data = foreign.read_bytes()
    host = make_host(shared_redis.url, mine, tmp_path, data_dir=home, target_version=target)
    with pytest.raises(StateError, match=f"must be of {told} .*data_dir of its own"):
        host.connect()
    assert foreign.read_bytes() == data
    assert not client.exists(mine.epoch) and not client.exists(mine.state)


@pytest.fixture
def old(shared_redis, client, keys, tmp_path):
    """A data folder of a release without services' folders: state, log, traces and versions lie in it."""
    served(shared_redis.url, client, keys, tmp_path, target_version="t")
    host_file = tmp_path / snapshot_name("t")
    host_file.rename(tmp_path / snapshot_name(""))
    TraceStore(tmp_path / "traces").write_shard([make_trace("a")], "math")
    (tmp_path / "registry" / "manifests").mkdir(parents=True)
    (tmp_path / "registry" / "manifests" / "v.json").write_text("{}")
    return tmp_path


def test_files_of_an_older_release_are_taken_over_by_the_service_that_redis_knows(shared_redis, client, keys, old):
    home, lines = service_home(old, keys.model), (old / DECISIONS).read_text()
    with ThreadPoolExecutor(4) as pool:  # replicas start together
        list(pool.map(lambda _: prepare_home(home), range(8)))
    assert len(TraceStore(home / "traces").list_shards()) == 1 and not (old / "traces").exists()
    assert (home / "registry" / "manifests" / "v.json").samefile(old / "registry" / "manifests" / "v.json")
    assert DrafterRegistry(home / "registry") is not None
    assert not [p for p in home.iterdir() if p.name.startswith(".")]
    rows, num_booked = stored(client, keys).num_rows, stored(client, keys).num_booked
    host = make_host(shared_redis.url, keys, old, data_dir=home)
    host.connect()
    settle(host)
    assert stored(client, keys).num_rows == rows
    assert (home / DECISIONS).read_text().startswith(lines) and not (old / DECISIONS).exists()
    assert not (old / snapshot_name("")).exists()
    assert len(ledger(client, keys, home)) == num_booked > 0


def test_a_service_that_redis_does_not_know_takes_no_state_of_an_older_release(shared_redis, client, keys, old):
    stranger = Keys(keys.model + "-new")
    home = service_home(old, stranger.model)
    prepare_home(home)
    host = make_host(shared_redis.url, stranger, old, data_dir=home)
    with pytest.raises(StateError, match="does not say whose it is: move it to"):
        host.connect()
    assert (old / DECISIONS).is_file() and (old / snapshot_name("")).is_file()
    (old / snapshot_name("")).rename(home / snapshot_name("t"))  # what the sentence asks for
    with pytest.raises(StateError, match="must be of model"):  # it does say, since this release wrote it
        host.connect()
    (home / snapshot_name("t")).rename(old / "away")
    host.connect()
    assert host.session.state.num_rows == 0


def test_nothing_is_taken_from_beside_a_folder_that_is_no_services(tmp_path):
    (tmp_path / DECISIONS).write_text("{}\n")
    (tmp_path / "a" / "b").mkdir(parents=True)
    adopt_state(tmp_path / "a" / "b", "t")
    assert (tmp_path / DECISIONS).exists() and not list((tmp_path / "a" / "b").iterdir())
