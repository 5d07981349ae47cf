"""The shipped cluster and Serve files pass Ray's own schemas and hold no key that Ray would silently ignore."""

from __future__ import annotations

import copy
import logging
import shutil
import subprocess
import sys
import typing
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from ray._private.authentication import authentication_token_setup
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from paceline.adapt.online.task import task_options
from paceline.config import ServiceConfig, TrainerResources
from paceline.errors import ConfigError
from paceline.infra.app import build
from paceline.infra.controller.actor import RayLauncher, build_host
from paceline.infra.service.parts import controller_spec
from paceline.infra.service.stores import StorePaths
from paceline.infra.state.redis_clients import Keys
from paceline.records import build as build_record

ROOT = Path(__file__).resolve().parents[3]
SERVICE = ROOT / "infra" / "service.yaml"
CLUSTER = ROOT / "ray_cluster.yaml"


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def models_in(hint: Any) -> list[type[BaseModel]]:
    """pydantic models inside a type hint, through unions and lists."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return [hint]
    return [m for arg in typing.get_args(hint) for m in models_in(arg)]


def unknown_keys(values: Any, kind: type[BaseModel], path: str = "") -> list[str]:
    """Paths of keys that the schema does not know; free-form dictionaries (args, env_vars) are not walked."""
    out = []
    for key, value in values.items():
        field = kind.model_fields.get(key)
        if field is None:
            out.append(path + key)
            continue
        nested = models_in(field.annotation)
        for item in value if isinstance(value, list) else [value]:
            if nested and isinstance(item, dict):
                complaints = [unknown_keys(item, model, f"{path}{key}.") for model in nested]
                out += min(complaints, key=len)
    return out


def test_serve_config_is_valid_and_has_no_unknown_key() -> None:
    values = load(SERVICE)
    ServeDeploySchema.model_validate(values)
    assert unknown_keys(values, ServeDeploySchema) == []


@pytest.mark.parametrize(
    "path",
    [(), ("http_options",), ("applications", 0), ("applications", 0, "deployments", 0),
     ("applications", 0, "deployments", 0, "ray_actor_options")],
)  # fmt: skip
def test_a_misspelt_key_is_found_at_every_level(path: tuple) -> None:
    values = load(SERVICE)
    place = values
    for step in path:
        place = place[step]
    place["max_ongoing_request"] = 5
    assert [k.rpartition(".")[2] for k in unknown_keys(values, ServeDeploySchema)] == ["max_ongoing_request"]


def test_serve_config_args_are_a_service_config() -> None:
    values = load(SERVICE)
    app = values["applications"][0]
    config = build_record(ServiceConfig, app["args"])
    assert app["import_path"] == "paceline.infra.app:build"
    assert not {"num_replicas", "autoscaling_config"} & set(app["deployments"][0]), "they are said once, in args"
    assert "max_ongoing_requests" not in app["deployments"][0], "it follows from the engine's limits"
    limit = build({**app["args"], "redis_url": None})._bound_deployment._deployment_config.max_ongoing_requests
    assert limit >= config.engine.max_running + config.engine.max_waiting
    with pytest.raises(ConfigError, match="modle"):
        build({**app["args"], "modle": "x"})
    with pytest.raises(ConfigError, match="http_options, as ssl_certfile"):
        build({**app["args"], "tls_cert": "/c.pem", "tls_key": "/k.pem"})


def test_a_model_of_ones_own_has_the_drafter_that_the_command_would_give_it() -> None:
    args = {**load(SERVICE)["applications"][0]["args"], "redis_url": None}
    given = [
        build({**args, **own})._bound_deployment.init_args[1]
        for own in ({}, {"model": "m"}, {"model": "m", "drafter": "d"})
    ]
    assert [values.get("drafter", "bundled") for values in given] == ["bundled", "lookup", "d"]


def test_secrets_reach_the_replicas_without_standing_in_the_file(tmp_path: Path, monkeypatch, caplog) -> None:
    """What `serve config` and Ray's dashboard show is the file."""
    text, args = SERVICE.read_text(encoding="utf-8"), load(SERVICE)["applications"][0]["args"]
    assert args["api_token"] is None and args["admin_token"] is None and "@" not in args["redis_url"]
    (tmp_path / "token").write_text("of-a-file\n")
    monkeypatch.setenv("PACELINE_API_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("PACELINE_ADMIN_TOKEN", "of-the-environment")
    monkeypatch.setenv("PACELINE_REDIS_URL", "redis://:secret@redis.internal:6380/0")
    given = build({**args, "redis_url": None})._bound_deployment.init_args[1]
    assert (given["api_token"], given["admin_token"]) == ("of-a-file", "of-the-environment")
    assert given["redis_url"] == "redis://:secret@redis.internal:6380/0"
    assert not any(secret in text for secret in ("of-a-file", "of-the-environment", ":secret@"))
    build({**args, "redis_url": None, "token_file": "/run/secrets/tokens.yaml"})
    assert "can be read" not in caplog.text, "a path tells nothing"
    build({**args, "redis_url": None, "admin_token": "in-args"})
    assert "admin_token in args can be read" in caplog.text and "in-args" not in caplog.text
    monkeypatch.setenv("PACELINE_API_TOKEN_FILE", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="PACELINE_API_TOKEN_FILE must name a readable text file"):
        build(args)


def test_a_secret_in_the_file_is_warned_of_without_being_said(caplog, monkeypatch) -> None:
    monkeypatch.setattr(
        logging.getLogger("paceline.infra.app"), "disabled", False
    )  # servers of other tests configure logging
    caplog.set_level(logging.WARNING, logger="paceline.infra.app")
    args = load(SERVICE)["applications"][0]["args"]
    build(args)
    assert "can be read" not in caplog.text
    build({**args, "api_token": "shown", "redis_url": "redis://:shown@redis.internal:6380/0"})
    assert "redis_url and api_token in args can be read" in caplog.text
    assert "PACELINE_REDIS_URL and PACELINE_API_TOKEN" in caplog.text and "shown" not in caplog.text


def test_a_rolling_restart_needs_no_free_slot() -> None:
    assert load(SERVICE)["applications"][0]["deployments"][0]["max_surge_percent"] == 0
    assert build(load(SERVICE)["applications"][0]["args"])._bound_deployment._deployment_config.max_surge_percent == 0


def number_of_engines(**args: Any) -> tuple[int, Any]:
    """What Serve is told of the engines' number by an application of these values."""
    found = build({"device": "cuda", **args})._bound_deployment._deployment_config
    return found.num_replicas, found.autoscaling_config


def test_a_replica_is_full_before_serve_starts_another_one() -> None:
    args = load(SERVICE)["applications"][0]["args"]
    _, scaling = number_of_engines(**args)
    assert (scaling.min_replicas, scaling.max_replicas) == (args["num_replicas"], args["autoscaling"]["max_replicas"])
    assert scaling.target_ongoing_requests == args["engine"]["max_running"]
    assert scaling.look_back_period_s > scaling.metrics_interval_s, "Serve wants several counts in its mean"
    assert scaling.upscale_delay_s == 10 and scaling.downscale_delay_s == 600
    _, scaling = number_of_engines(num_replicas=2, autoscaling={"max_replicas": 5, "target_ongoing_requests": 7})
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 5, 7)
    assert load(CLUSTER)["available_node_types"]["serve_gpu"]["max_workers"] >= args["autoscaling"]["max_replicas"]


def test_without_a_larger_number_the_number_is_fixed() -> None:
    assert number_of_engines(num_replicas=2) == (2, None)
    assert number_of_engines(num_replicas=2, autoscaling={"max_replicas": 2}) == (2, None)


def test_the_documented_file_of_two_applications_is_one_that_serve_and_the_services_take() -> None:
    text = (ROOT / "docs" / "api" / "scaling.md").read_text(encoding="utf-8")
    values = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    ServeDeploySchema.model_validate(values)
    assert unknown_keys(values, ServeDeploySchema) == []
    first, second = (build_record(ServiceConfig, app["args"]) for app in values["applications"])
    assert first.model_name != second.model_name and first.data_dir == second.data_dir
    assert Keys(first.model_name).base != Keys(second.model_name).base
    assert StorePaths.of(first).home != StorePaths.of(second).home
    for app in values["applications"]:
        assert app["name"] == app["args"]["model_name"] == app["route_prefix"].strip("/")
        build(app["args"])
    values["applications"][1]["route_prefix"] = "/small"
    with pytest.raises(ValueError, match="route_prefix is unique"):
        ServeDeploySchema.model_validate(values)


def test_serve_config_names_the_deployment_that_is_built() -> None:
    app = load(SERVICE)["applications"][0]
    built = build(app["args"])
    assert [d["name"] for d in app["deployments"]] == [built._bound_deployment.name]


def test_cluster_config_passes_rays_schema() -> None:
    validate_config(prepare_config(copy.deepcopy(load(CLUSTER))))


def test_cluster_config_with_an_unknown_key_is_refused_by_rays_schema() -> None:
    values = load(CLUSTER)
    values["available_node_types"]["serve_gpu"]["max_worker"] = 3
    with pytest.raises(Exception, match="max_worker"):
        validate_config(prepare_config(values))


def test_cluster_has_head_replicas_and_trainers_and_its_own_setup() -> None:
    values = load(CLUSTER)
    types = values["available_node_types"]
    assert types[values["head_node_type"]]["resources"]["CPU"] == 0
    assert {t.get("labels", {}).get("paceline/role") for t in types.values()} == {"head", "serve", "train"}
    assert values["setup_commands"], "without it Ray installs a nightly build of itself"
    assert values["setup_commands"] == [
        'pip install -c ~/paceline-source/constraints.txt "$HOME/paceline-source[otel,s3]" "ray[default,serve]==2.60.0"'
    ]
    slot = load(SERVICE)["applications"][0]["deployments"][0]["ray_actor_options"]["resources"]
    assert set(slot) <= set(types["serve_gpu"]["resources"])


def test_every_node_wants_rays_token_and_gets_it() -> None:
    values = load(CLUSTER)
    starts = [
        c for k in ("head_start_ray_commands", "worker_start_ray_commands") for c in values[k] if "ray start" in c
    ]
    assert len(starts) == 2 and all("RAY_AUTH_MODE=token ray start" in c for c in starts)
    assert values["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert authentication_token_setup._get_default_token_path() == Path("~/.ray/auth_token").expanduser()


def service_config() -> ServiceConfig:
    return build_record(ServiceConfig, load(SERVICE)["applications"][0]["args"])


def test_a_node_type_and_only_the_trainers_has_what_a_training_task_asks_for() -> None:
    asked = task_options(service_config().trainer_resources)
    wanted = {"CPU": asked["num_cpus"], "GPU": asked["num_gpus"], **asked["resources"]}
    assert wanted["GPU"] == 1 and asked["resources"], "a training task must not land on a node that serves"
    types = load(CLUSTER)["available_node_types"]
    fitting = [n for n, t in types.items() if all(t["resources"].get(k, 0) >= v for k, v in wanted.items())]
    assert [types[n]["labels"]["paceline/role"] for n in fitting] == ["train"]
    assert all(types[n]["max_workers"] >= 1 for n in fitting)


def test_nodes_with_another_home_ask_for_the_same_controller(tmp_path: Path, monkeypatch) -> None:
    """Else the replicas of two nodes would replace each other's controller for ever."""
    config = replace(service_config(), model="~/model", data_dir="~/paceline", store_url="s3://bucket/x")
    specs = []
    for name in ("a", "b"):
        monkeypatch.setenv("HOME", str(tmp_path / name))
        specs += [controller_spec(c, "t") for c in (config, replace(config, store_url=None))]
    assert specs[:2] == specs[2:] and specs[0] != specs[1]


def test_controller_hands_the_configured_resources_to_its_launcher(tmp_path: Path, monkeypatch) -> None:
    config = replace(service_config(), data_dir=str(tmp_path))
    spec = controller_spec(config, "t")
    host = build_host(spec)
    assert host.config.start_s == config.trainer_resources.start_timeout_s == 900.0
    seen: dict[str, Any] = {}
    monkeypatch.setattr("paceline.adapt.online.task.launch_training", lambda job, **options: seen.update(options))
    RayLauncher(spec).launch(type("Job", (), {"job_id": "j"})(), None)  # type: ignore[arg-type]
    assert seen["resources"] == config.trainer_resources == TrainerResources(
        num_cpus=4, num_gpus=1, resources={"train_slot": 1}, start_timeout_s=900
    )  # fmt: skip


def test_every_node_mounts_the_shared_data_folder_and_redis_is_not_rays() -> None:
    values, config = load(CLUSTER), service_config()
    assert f"-v {config.data_dir}:{config.data_dir}" in values["docker"]["run_options"]
    assert any("mount" in c and c.endswith(config.data_dir) for c in values["initialization_commands"])
    assert config.redis_url is not None and ":6379" not in config.redis_url


@pytest.mark.slow
def test_the_mounted_files_are_enough_to_install_the_package(tmp_path: Path) -> None:
    prefix = "~/paceline-source/"
    for there, here in load(CLUSTER)["file_mounts"].items():
        if here.startswith("~"):  # of whoever starts the cluster, not of the checkout
            continue
        source = ROOT / here
        assert source.exists(), here
        if there.startswith(prefix):
            target = tmp_path / "source" / there.removeprefix(prefix)
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(tmp_path / "source")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("paceline", "kernels", "serving", "bandit", "adapt", "infra", "bench"):
        package = "paceline" if folder == "paceline" else f"paceline/{folder}"
        assert {f"{package}/{p.name}" for p in (ROOT / folder).glob("*.py")} <= names
    assert "paceline/infra/service.yaml" in names
    if shutil.which("c++"):
        assert "paceline/kernels/cpu/libround.so" in names, "the compiled round comes of setup.py"
