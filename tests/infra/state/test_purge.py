"""Claims of infra/state/purge.py."""

import pytest
from typer.testing import CliRunner

from paceline.adapt.data.trace_store import TraceStore
from paceline.cli.main import app, main
from paceline.errors import ConfigError
from paceline.infra.state.purge import PurgeOptions, purge
from paceline.paths import service_home
from tests.helpers import refusing_store
from tests.helpers.drafters import make_trace


@pytest.fixture
def store(tmp_path):
    made = TraceStore(service_home(tmp_path, "paceline") / "traces")
    for tenant in ("acme", "acme", "other"):
        trace = make_trace("r")
        trace.extra = {"tenant": tenant}
        made.write_shard([trace], "math")
    return made


def test_a_tenants_traces_go_wherever_they_lie(store, tmp_path):
    for home in (service_home(tmp_path, "other/model"), tmp_path):
        trace = make_trace("r")
        trace.extra = {"tenant": "acme"}
        TraceStore(home / "traces").write_shard([trace], "math")
    assert purge(PurgeOptions(data_dir=tmp_path, tenant="acme")) == 4


def test_one_tenant_or_everything_goes(store, tmp_path):
    assert purge(PurgeOptions(data_dir=tmp_path, tenant="acme")) == 2
    assert len(store.list_shards()) == 1
    assert purge(PurgeOptions(data_dir=tmp_path, is_all=True)) == 1
    assert store.list_shards() == []


@pytest.mark.parametrize("options", [{"tenant": "nobody"}, {"is_all": True}])
def test_what_a_killed_writer_left_half_written_goes_whoever_it_is_of(store, tmp_path, options):
    left = service_home(tmp_path, "paceline") / "traces" / "0001_5_t_aa_math.safetensors.ab12.tmp"
    left.write_bytes(b"half a shard")
    purge(PurgeOptions(data_dir=tmp_path, **options))
    assert not left.exists()


@pytest.mark.parametrize(("tenant", "is_all"), [(None, False), ("acme", True)])
def test_half_an_order_deletes_nothing(store, tmp_path, tenant, is_all):
    with pytest.raises(ConfigError, match="either --tenant NAME or --all"):
        purge(PurgeOptions(data_dir=tmp_path, tenant=tenant, is_all=is_all))
    assert len(store.list_shards()) == 3


def test_traces_in_an_object_store_go_too(tmp_path):
    store = TraceStore("memory://purge/services/m/traces")
    store.write_shard([make_trace()], "math")
    assert purge(PurgeOptions(data_dir=tmp_path, store_url="memory://purge", is_all=True)) == 1
    assert store.list_shards() == []


def test_what_was_captured_before_there_was_a_store_goes_with_what_is_in_it(store, tmp_path):
    TraceStore("memory://purge-both/services/m/traces").write_shard([make_trace()], "math")
    assert purge(PurgeOptions(data_dir=tmp_path, store_url="memory://purge-both", is_all=True)) == 4
    assert store.list_shards() == []


def test_a_store_that_is_not_there_deletes_nothing_of_the_data_folder(store, tmp_path):
    with pytest.raises(ConfigError, match="store-url must be the object store"):
        purge(PurgeOptions(data_dir=tmp_path, store_url="memory://purge-typo", is_all=True))
    assert len(store.list_shards()) == 3


def test_a_store_without_a_service_or_that_refuses_is_told_of_in_one_sentence(tmp_path, monkeypatch, capsys):
    said = {}
    for url in ("memory://purge-none", refusing_store.URL):
        monkeypatch.setattr("sys.argv", ["paceline", "purge-traces", "--all", "--store-url", url])
        with pytest.raises(SystemExit, match="2"):
            main()
        said[url] = capsys.readouterr().err
    assert "store-url must be the object store of a service" in said["memory://purge-none"]
    assert "/bucket/prefix/services: the store failed: NoCredentials" in said[refusing_store.URL]


def test_a_folder_without_traces_says_so(tmp_path):
    with pytest.raises(ConfigError, match="there are no traces"):
        purge(PurgeOptions(data_dir=tmp_path, tenant="acme"))


def test_the_command_says_what_it_deleted(store, tmp_path):
    done = CliRunner().invoke(app, ["purge-traces", "--data-dir", str(tmp_path), "--tenant", "acme"])
    assert done.exit_code == 0 and "deleted 2 shards" in done.stdout
