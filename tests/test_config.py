"""Configuration: unknown keys and wrong types are refused with the key's full name."""

import dataclasses
import pickle
import re

import pytest

from paceline.config import (
    PolicyConfig,
    ServeOptions,
    ServiceConfig,
    TreeConfig,
    load_config,
    load_token_file,
    override,
    read_yaml,
    to_dict,
    with_absolute_paths,
)
from paceline.errors import ConfigError
from paceline.records import build


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"engin": {}}, "engin is not a setting"),
        ({"engine": {"tree": {"max_nodes": 3}}}, "engine.tree.max_nodes is not a setting"),
        ({"engine": {"max_running": "many"}}, "engine.max_running must be int"),
        ({"engine": {"max_running": True}}, "engine.max_running must be int"),
        ({"engine": 3}, "engine must be a mapping"),
        ({"policy": {"policy": "magic"}}, "payoff, never, always, interval"),
        ({"num_replicas": 0}, "num_replicas"),
        ({"resume": "yes"}, "resume must be bool"),
        ({"ingress": {"num_replicas": 0}}, "ingress.num_replicas must be in"),
        ({"ingress": {"max_resumes": -1}}, "ingress.max_resumes must be in"),
        ({"ingress": {"max_wait_s": 0}}, "ingress.max_wait_s must be > 0"),
        ({"trainer_resources": {"resources": 3}}, "trainer_resources.resources must be a mapping"),
        ({"trainer_resources": {"resources": {"train_slot": "one"}}}, "resources.train_slot must be float"),
        ({"trainer_resources": {"resources": {"train_slot": 0}}}, "resources.train_slot must be > 0"),
        ({"trainer_resources": {"resources": {"GPU": 1}}}, "use num_cpus and num_gpus"),
        ({"trainer_resources": {"num_gpus": 2}}, "trainer_resources.num_gpus must be in"),
        ({"dtype": "int4"}, "dtype"),
        ({"autoscaling": {"max_replicas": 0}}, "autoscaling.max_replicas must be in"),
        ({"autoscaling": {"downscale_delay_s": -1}}, "autoscaling.downscale_delay_s must be >= 0"),
        (
            {"num_replicas": 3, "autoscaling": {"max_replicas": 2}},
            "(--max-replicas) must be at least num_replicas (--replicas), which is 3, got 2",
        ),
        (
            {"engine": {"max_running": 4, "max_waiting": 4}, "autoscaling": {"target_ongoing_requests": 9}},
            "must be at most engine.max_running + engine.max_waiting, 8",
        ),
        ({"feedback": {"max_rows": 0}}, "feedback.max_rows must be >= 1"),
        ({"feedback": {"flush_interval_s": 0}}, "feedback.flush_interval_s must be > 0"),
        ({"trace": {"max_pending": 0}}, "trace.max_pending must be >= 1"),
        ({"trace": {"shard_rows": 0}}, "trace.shard_rows must be >= 1"),
        ({"trace": {"flush_interval_s": 0}}, "trace.flush_interval_s must be > 0"),
        ({"trace": {"max_bytes": -1}}, "trace.max_bytes must be >= 0"),
        ({"trace": {"topk": 0}}, "trace.topk must be >= 1"),
        ({"policy": {"seed": -1}}, "policy.seed must be >= 0"),
        ({"trainer_threads": 0}, "trainer_threads must be >= 1"),
    ],
)
def test_wrong_setting_is_refused_by_name(values, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(ServiceConfig, values)


def test_configuration_survives_the_way_through_plain_values():
    config = build(ServiceConfig, {"engine": {"tree": {"max_frontier": 2}}, "policy": {"bank_s": 5}})
    assert build(ServiceConfig, to_dict(config)) == config
    assert config.policy.bank_s == 5.0


def test_yaml_file_is_read_and_bad_yaml_is_refused(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("num_replicas: 2\nengine: {max_running: 4}\n")
    assert load_config(path).engine.max_running == 4
    path.write_text("a: [")
    with pytest.raises(ConfigError, match="must be YAML"):
        load_config(path)
    with pytest.raises(ConfigError, match="readable file"):
        load_config(tmp_path / "none.yaml")
    path.write_text("model_name: 2020-13-40\n")
    with pytest.raises(ConfigError, match="must be YAML: month"):
        load_config(path)
    for text in ("model: a\nadmin_token: @hunter2\n", "model: a\nadmin_token: 'hunter2\n", "admin_token: hunter2: x\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"at line [123]") as refused:
            load_config(path)
        assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "name", "line", "first"),
    [
        ("port: 1\nengine:\n  port: 1\nport: 2\n", "port", 4, 1), ("engine: {max_running: 4, max_running: 4}\n", "max_running", 1, 1),
        ("served_model_names:\n  - {a: 1,\n     b: 2,\n     'a': 1}\n", "a", 4, 2),
    ],
)  # fmt: skip
def test_a_key_that_is_given_twice_is_refused_by_name_and_line(tmp_path, text, name, line, first):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(
        ConfigError, match=f"must give each key once: '{name}' of line {line} is in line {first} already"
    ):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("2026-12-01: x\n", "not datetime.date"),
        ("policy: &all\n  policy: *all\n", "Circular reference"),
        ("engine: " + "[" * 5000, "recursion"),
    ],
)
def test_what_is_no_plain_value_is_refused_in_one_sentence(tmp_path, text, why):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    for load in (load_config, load_token_file):
        with pytest.raises(ConfigError, match=why if load is load_config else "token_file .* must be") as e:
            load(path)
        assert "\n" not in str(e.value)


def test_aliases_and_merges_repeat_no_key(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("a: &a {x: 1}\nb: {<<: *a, x: 2}\nc: [*a, *a]\n")
    assert read_yaml(path, "it") == {"a": {"x": 1}, "b": {"x": 2}, "c": [{"x": 1}, {"x": 1}]}


def test_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ServiceConfig().host = "x"  # type: ignore[misc]


def test_a_section_made_in_python_names_the_whole_setting_and_refuses_what_a_file_may_not_say():
    with pytest.raises(ConfigError, match=r"^engine\.tree\.bundle_width must be >= 1, got 0$"):
        TreeConfig(bundle_width=0)
    with pytest.raises(ConfigError, match=r"^policy\.bank_s must be a finite number, got inf$"):
        PolicyConfig(bank_s=float("inf"))
    with pytest.raises(ConfigError, match=r"^num_replicas must be int, got '2'$"):
        ServiceConfig(num_replicas="2")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"ema_slow must be in \(0, ema_fast=0\.5\), got 0\.6$"):
        PolicyConfig(ema_slow=0.6)
    for end in ("tomorrow", "2026-12-01T08:00"):
        with pytest.raises(
            ConfigError, match=r"^policy\.ends_at must be a date and a time with their zone, .*, got '2?"
        ):
            PolicyConfig(ends_at=end)
    assert (
        PolicyConfig(ends_at="2026-12-01T09:00+01:00").end_s
        == PolicyConfig(ends_at="2026-12-01T08:00Z").end_s
        == 1796112000.0
    )
    assert PolicyConfig().end_s == float("inf")


def test_every_default_is_within_its_bounds_and_a_copy_is_checked_too():
    config = ServiceConfig()
    assert pickle.loads(pickle.dumps(config)) == config and hash(config.engine) == hash(config.engine)
    with pytest.raises(ConfigError, match="port must be in"):
        dataclasses.replace(config, port=-1)


def test_a_changed_setting_leaves_its_neighbours_alone():
    config = override(ServiceConfig(), {"engine.tree.mix": "suffix", "engine.max_running": 3, "policy.seed": 5})
    assert (config.engine.tree.mix, config.engine.max_running, config.policy.seed) == ("suffix", 3, 5)
    assert override(config, {"engine.tree.mix": "none"}).engine.max_running == 3


def test_no_token_is_shown_where_a_token_is_refused():
    with pytest.raises(ConfigError, match="api_token must be ASCII") as error:
        ServiceConfig(api_token=" secret")
    assert "secret" not in str(error.value) and "secret" not in repr(ServiceConfig(api_token="secret"))
    for name, value in (("admin_token", 123456), ("api_token", [123456]), ("redis_url", {"host": "redis://:123456@h"})):
        with pytest.raises(ConfigError, match=f"^{name} must be str, got something else$"):
            build(ServiceConfig, {name: value})


def test_options_of_serve_change_a_file_only_where_given(tmp_path):
    assert ServeOptions().service() == ServiceConfig()
    path = tmp_path / "c.yaml"
    path.write_text("engine: {tree: {policy: bundle, bundle_width: 3, max_frontier: 2}}\n", encoding="utf-8")
    tree = ServeOptions(config=path, changes={"engine.tree.max_draft_tokens": 8}).service().engine.tree
    assert (tree.policy, tree.bundle_width, tree.max_frontier, tree.max_draft_tokens) == ("bundle", 3, 2, 8)


def test_more_draft_tokens_continue_the_budgets_and_reach_replicas_as_plain_values():
    config = ServeOptions(changes={"engine.tree.max_draft_tokens": 32, "engine.tree.policy": "bastion"}).service()
    assert build(ServiceConfig, to_dict(config)) == config


def test_a_model_of_ones_own_gets_a_drafter_that_fits_every_target(tmp_path):
    assert ServeOptions(changes={"model": "m"}).service().drafter == "lookup"
    assert ServeOptions(changes={"model": "m", "drafter": "suffix"}).service().drafter == "suffix"
    file = tmp_path / "c.yaml"
    file.write_text("drafter: none\n")
    assert ServeOptions(config=file, changes={"model": "m"}).service().drafter == "none"
    file.write_text("model: m\n")
    assert ServeOptions(config=file).service() == ServeOptions(changes={"model": "m"}).service()
    assert ServeOptions(config=file, changes={"model": "bundled"}).service() == ServiceConfig()
    file.write_text("model: m\ndrafter: bundled\n")
    assert ServeOptions(config=file).service().drafter == "bundled", "refused where it is loaded, with what there is"


@pytest.mark.parametrize("mix", ["lookup", "suffix"])
def test_a_mix_without_a_drafter_to_mix_with_is_refused_with_what_to_give_instead(mix):
    assert ServeOptions(changes={"drafter": mix}).service().drafter == mix
    with pytest.raises(ConfigError, match=f"mix must be none with drafter none .*give drafter {mix}.*, got '{mix}'"):
        ServeOptions(changes={"drafter": "none", "engine.tree.mix": mix}).service()
    with pytest.raises(ConfigError, match=f"mix must be none with drafter suffix-recent .*, got '{mix}'"):
        ServeOptions(changes={"drafter": "suffix-recent", "engine.tree.mix": mix}).service()


def test_relative_paths_become_those_of_this_process_and_names_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ServiceConfig(model="m", drafter="d/e", data_dir="data", token_file="t.yaml")
    found = with_absolute_paths(given)
    assert (found.model, found.drafter) == (str(tmp_path / "m"), str(tmp_path / "d/e"))
    assert (found.data_dir, found.token_file, found.tls_cert) == (
        str(tmp_path / "data"),
        str(tmp_path / "t.yaml"),
        None,
    )
    for config in (
        ServiceConfig(),
        ServiceConfig(drafter="lookup", data_dir="~/x", token_file=str(tmp_path / "t.yaml")),
    ):
        assert with_absolute_paths(config) == config
