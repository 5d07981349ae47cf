"""Configuration: unknown keys and wrong types are refused with the key's full name."""

import dataclasses

import pytest

from paceline.config import ServiceConfig, build_config, load_config, to_dict
from paceline.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"engin": {}}, "engin is not a setting"),
        ({"engine": {"tree": {"max_nodes": 3}}}, "engine.tree.max_nodes is not a setting"),
        ({"engine": {"max_running": "many"}}, "engine.max_running must be int"),
        ({"engine": {"max_running": True}}, "engine.max_running must be int"),
        ({"engine": 3}, "engine. must be a mapping"),
        ({"policy": {"policy": "magic"}}, "never, always, interval, payoff"),
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
        ({"dtype": "int8"}, "dtype"),
    ],
)
def test_wrong_setting_is_refused_by_name(values, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        build_config(ServiceConfig, values)


def test_configuration_survives_the_way_through_plain_values():
    config = build_config(ServiceConfig, {"engine": {"tree": {"max_frontier": 2}}, "policy": {"bank_s": 5}})
    assert build_config(ServiceConfig, to_dict(config)) == config
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


def test_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ServiceConfig().host = "x"  # type: ignore[misc]
