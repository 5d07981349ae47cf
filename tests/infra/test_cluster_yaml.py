"""The shipped cluster and Serve files pass Ray's own schemas and hold no key that Ray would silently ignore."""

from __future__ import annotations

import copy
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from paceline.config import ServiceConfig, build_config
from paceline.errors import ConfigError
from paceline.infra.app import build

ROOT = Path(__file__).resolve().parents[2]
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
    config = build_config(ServiceConfig, app["args"])
    assert app["import_path"] == "paceline.infra.app:build"
    assert config.num_replicas == app["deployments"][0]["num_replicas"]
    limit = app["deployments"][0]["max_ongoing_requests"]
    assert limit >= config.engine.max_running + config.engine.max_waiting
    with pytest.raises(ConfigError, match="modle"):
        build({**app["args"], "modle": "x"})


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
    assert {t.get("labels", {}).get("paceline/role") for t in types.values()} == {None, "serve", "train"}
    assert values["setup_commands"], "without it Ray installs a nightly build of itself"
    slot = load(SERVICE)["applications"][0]["deployments"][0]["ray_actor_options"]["resources"]
    assert set(slot) <= set(types["serve_gpu"]["resources"])
    assert all("RAY_AUTH_MODE" in c for c in values["head_start_ray_commands"] if "--head" in c)
