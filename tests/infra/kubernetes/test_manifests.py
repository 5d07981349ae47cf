"""The manifests for Kubernetes hold no field that the cluster would refuse or drop, and agree with each other and the code."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import redis
import yaml
from ray.autoscaler._private.kuberay import autoscaling_config
from ray.serve.schema import ServeDeploySchema

from paceline.adapt.online.task import task_options
from paceline.config import VARIABLES, ServiceConfig
from paceline.infra.app import SERVE_SETTINGS, build
from paceline.infra.controller.actor import HEAD_ROLE, ROLE_LABEL, TRAIN_ROLE
from paceline.infra.state.redis_server import find_redis_binary
from paceline.machine import free_port
from paceline.records import build as build_record
from tests.helpers.kubernetes import VERSIONS, environments, faults, groups_of

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "infra" / "kubernetes" / "manifests"
PAGE = ROOT / "docs" / "api" / "kubernetes.md"
CRD_VARIABLE = "KUBERAY_CRD"

CLUSTER = "spec.rayClusterConfig"
HEAD = f"{CLUSTER}.headGroupSpec"
GROUP = f"{CLUSTER}.workerGroupSpecs"
RAY_FIELDS = {
    "": "apiVersion kind metadata spec",
    "spec": "excludeHeadPodFromServeSvc rayClusterDeletionDelaySeconds upgradeStrategy serveConfigV2 rayClusterConfig",
    "spec.upgradeStrategy": "type",
    CLUSTER: "rayVersion authOptions gcsFaultToleranceOptions enableInTreeAutoscaling autoscalerOptions headGroupSpec workerGroupSpecs",
    f"{CLUSTER}.authOptions": "mode",
    f"{CLUSTER}.gcsFaultToleranceOptions": "redisAddress redisPassword",
    f"{CLUSTER}.autoscalerOptions": "version idleTimeoutSeconds resources",
    HEAD: "labels rayStartParams template",
    GROUP: "groupName replicas minReplicas maxReplicas labels rayStartParams template",
}
"""Fields of ray.io/v1 RayService that the manifest uses, as in ray-operator/config/crd/bases/ray.io_rayservices.yaml of
KubeRay 1.5.1, 1.6.2 and 1.7.0; `KUBERAY_CRD=FILE pytest ...` walks the whole manifest through that file."""


def load(name: str) -> dict[str, Any]:
    (found,) = yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return found


NAMES = sorted(p.stem for p in FOLDER.iterdir())
MANIFESTS = {name: load(name) for name in NAMES}
SERVICE = MANIFESTS["rayservice"]
SERVE = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])
GROUPS = groups_of(SERVICE)
PODS = {
    **{name: g["template"]["spec"] for name, g in GROUPS.items()},
    **{n: MANIFESTS[n]["spec"]["template"]["spec"] for n in NAMES if MANIFESTS[n]["kind"] == "StatefulSet"},
}
CONFIG = build_record(ServiceConfig, SERVE["applications"][0]["args"])


def unknown(value: Any, table: dict[str, str], path: str = "") -> list[str]:
    """Paths of the keys that a table does not have; what it has no line for is not walked."""
    if isinstance(value, list):
        return [p for item in value for p in unknown(item, table, path)]
    if path not in table or not isinstance(value, dict):
        return []
    found = [f"{path}.{key}" for key in value if key not in table[path].split()]
    return found + [p for k, v in value.items() for p in unknown(v, table, f"{path}.{k}".lstrip("."))]


def walk(value: Any, schema: dict[str, Any], path: str = "") -> list[str]:
    """What a value has that an OpenAPI schema does not allow."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return []
    if isinstance(value, dict):
        known, more = schema.get("properties", {}), schema.get("additionalProperties")
        out = [f"{path} lacks {k}" for k in schema.get("required", []) if k not in value]
        for key, item in value.items():
            if key in known or isinstance(more, dict):
                out += walk(item, known.get(key, more), f"{path}.{key}")
            elif known or schema.get("type") != "object":
                out.append(f"{path}.{key} is not known")
        return out
    if isinstance(value, list):
        if schema.get("type") != "array":
            return [f"{path} is no list"]
        return [p for i, item in enumerate(value) for p in walk(item, schema["items"], f"{path}[{i}]")]
    kinds: dict[str, Any] = {"string": str, "integer": int, "boolean": bool, "number": (int, float)}
    kind = (int, str) if schema.get("x-kubernetes-int-or-string") else kinds.get(schema.get("type", ""), ())
    out = [] if isinstance(value, kind) else [f"{path}: {value!r} is no {schema.get('type')}"]
    return out if value in schema.get("enum", [value]) else [*out, f"{path}: {value!r} is none of {schema['enum']}"]


def test_only_known_fields_are_used() -> None:
    assert unknown(SERVICE, RAY_FIELDS) == []
    assert {name: faults(manifest) for name, manifest in MANIFESTS.items()} == {name: [] for name in NAMES}


def test_a_planted_field_is_found() -> None:
    planted = json.loads(json.dumps(SERVICE))
    planted["spec"]["rayClusterConfig"]["workerGroupSpecs"][1]["minReplica"] = 0
    assert unknown(planted, RAY_FIELDS) == [f"{GROUP}.minReplica"]


@pytest.mark.parametrize(
    ("name", "path", "key", "value"),
    [("rayservice", ("spec", "rayClusterConfig", "headGroupSpec", "template", "spec", "containers", 0), "readinesProbe", {}),
     ("budget-serve", ("spec",), "maxUnavailabel", 1),
     ("redis-address", ("spec", "ports", 0), "port", "redis"),
     ("redis", ("spec",), "serviceNames", "x"),
     ("storage", ("spec",), "accessModes", "ReadWriteMany")],
)  # fmt: skip
def test_a_planted_fault_is_found(name: str, path: tuple, key: str, value: Any) -> None:
    planted = json.loads(json.dumps(MANIFESTS[name]))
    place = planted
    for step in path:
        place = place[step]
    place[key] = value
    found = faults(planted)
    assert len(found) == len(VERSIONS) and all(key in x or repr(value) in x for x in found)


def test_every_ray_has_what_paceline_serve_gives_its_own() -> None:
    assert environments(SERVICE) == dict.fromkeys(GROUPS, SERVE_SETTINGS)
    image = (ROOT / "infra" / "kubernetes" / "container" / "Containerfile").read_text(encoding="utf-8")
    assert dict(re.findall(r"(RAY_SERVE_\w+)=(\S+)", image)) == SERVE_SETTINGS
    cluster = yaml.safe_load((ROOT / "ray_cluster.yaml").read_text(encoding="utf-8"))
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        (start,) = [c for c in cluster[key] if "ray start" in c]
        assert dict(re.findall(r"(RAY_SERVE_\w+)=(\S+)", start.partition("ray start")[0])) == SERVE_SETTINGS


def test_rays_nodes_have_the_roles_that_the_controller_is_placed_by() -> None:
    spec = SERVICE["spec"]["rayClusterConfig"]
    types = autoscaling_config._generate_available_node_types_from_ray_cr_spec(spec)  # what Ray's autoscaler reads
    assert {name: t["labels"] for name, t in types.items()} == {
        "headgroup": {ROLE_LABEL: HEAD_ROLE}, "serve": {ROLE_LABEL: "serve"}, "train": {ROLE_LABEL: TRAIN_ROLE},
    }  # fmt: skip
    assert not any("labels" in g["rayStartParams"] for g in GROUPS.values()), "KubeRay 1.5 and later refuse it there"


@pytest.mark.skipif(CRD_VARIABLE not in os.environ, reason=f"{CRD_VARIABLE} names no file of KubeRay's CRD")
def test_the_whole_manifest_fits_the_operators_schema() -> None:
    crd = yaml.safe_load(Path(os.environ[CRD_VARIABLE]).read_text(encoding="utf-8"))
    (version,) = [v for v in crd["spec"]["versions"] if f"ray.io/{v['name']}" == SERVICE["apiVersion"]]
    assert walk(SERVICE, version["schema"]["openAPIV3Schema"]) == []


def test_the_service_is_the_one_of_service_yaml_but_for_what_the_secret_has() -> None:
    other = yaml.safe_load((ROOT / "infra" / "service.yaml").read_text(encoding="utf-8"))
    args = other["applications"][0]["args"]
    assert {**other, "applications": [{**other["applications"][0], "args": {**args, "redis_url": None}}]} == SERVE
    ServeDeploySchema.model_validate(SERVE)
    assert [d["name"] for d in SERVE["applications"][0]["deployments"]] == [
        build(SERVE["applications"][0]["args"])._bound_deployment.name
    ]


def test_tokens_and_addresses_come_from_a_secret_whose_keys_are_the_services_variables() -> None:
    text = PAGE.read_text(encoding="utf-8")
    (made,) = re.findall(r"create secret generic paceline-tokens((?: [^\n]*\\\n)*[^\n]*)", text)
    assert set(re.findall(r"--from-literal=(\w+)=", made)) == {
        VARIABLES[name]
        for name in VARIABLES
        if name not in ("token_file", "otlp_traces_endpoint")  # where there are tenants, and a collector
    }
    assert all(getattr(CONFIG, name) is None for name in VARIABLES), "what the file says would win over the secret"
    for name in GROUPS:  # Serve builds the application on any node
        assert PODS[name]["containers"][0]["envFrom"] == [{"secretRef": {"name": "paceline-tokens"}}]
    refs = {json.dumps(r) for r in secret_refs(MANIFESTS)}
    assert refs == {json.dumps({"name": "paceline-redis", "key": "password"})}
    assert "create secret generic paceline-redis --from-literal=password=" in text


def secret_refs(value: Any) -> list[dict[str, str]]:
    """Every secretKeyRef below a value."""
    if isinstance(value, list):
        return [r for item in value for r in secret_refs(item)]
    if not isinstance(value, dict):
        return []
    own = [value["secretKeyRef"]] if "secretKeyRef" in value else []
    return own + [r for v in value.values() for r in secret_refs(v)]


def test_no_manifest_has_a_password_of_its_own() -> None:
    for name in NAMES:
        text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
        assert not re.search(r"redis://[^ ]*:[^ ]*@|stringData|requirepass [^%]", text), name


def test_images_are_of_the_ray_that_the_service_is_tested_with() -> None:
    assert SERVICE["spec"]["rayClusterConfig"]["rayVersion"] == ray.__version__
    assert len({PODS[name]["containers"][0]["image"] for name in GROUPS}) == 1, "Ray must be the same everywhere"


def custom(group: str) -> dict[str, float]:
    return json.loads(json.loads(GROUPS[group]["rayStartParams"]["resources"]))


def test_a_replica_fits_a_serving_pod_and_a_training_task_a_trainer_and_nothing_else() -> None:
    def has(group: str) -> dict[str, float]:
        limits = PODS[group]["containers"][0]["resources"]["limits"]
        return {"CPU": float(limits["cpu"]), "GPU": float(limits["nvidia.com/gpu"]), **custom(group)}

    engine = SERVE["applications"][0]["deployments"][0]["ray_actor_options"]
    replica = {"CPU": engine["num_cpus"], "GPU": engine["num_gpus"], **engine["resources"]}
    task = task_options(CONFIG.trainer_resources)
    training = {"CPU": task["num_cpus"], "GPU": task["num_gpus"], **task["resources"]}
    for wanted, place in ((replica, "serve"), (training, "train")):
        fitting = [g for g in ("serve", "train") if all(has(g).get(k, 0) >= v for k, v in wanted.items())]
        assert fitting == [place]
    assert GROUPS["head"]["rayStartParams"]["num-cpus"] == "0"


def test_trainers_come_from_none_on_spot_machines_and_serving_pods_do_not() -> None:
    train, serve = GROUPS["train"], GROUPS["serve"]
    assert (train["replicas"], train["minReplicas"]) == (0, 0) and train["maxReplicas"] >= 1
    assert serve["minReplicas"] >= CONFIG.num_replicas
    assert serve["maxReplicas"] >= (CONFIG.autoscaling.max_replicas or 0) > serve["minReplicas"]
    spot = {t["key"] for t in PODS["train"]["tolerations"] if "spot" in t["key"] or t.get("value") == "spot"}
    assert len(spot) >= 2 and not spot & {t["key"] for t in PODS["serve"]["tolerations"]}
    assert SERVICE["spec"]["rayClusterConfig"]["autoscalerOptions"]["idleTimeoutSeconds"] > 0


def test_every_pod_mounts_the_shared_folder_that_the_service_writes_to() -> None:
    claim = MANIFESTS["storage"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for name in GROUPS:
        mounts = {m["name"]: m["mountPath"] for m in PODS[name]["containers"][0]["volumeMounts"]}
        volumes = {v["name"]: v for v in PODS[name]["volumes"]}
        assert mounts["data"] == CONFIG.data_dir and set(mounts) == set(volumes)
        assert volumes["data"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert PODS[name]["securityContext"]["fsGroup"], "the folder must be writable by the image's user"


def test_probes_ask_for_what_is_there() -> None:
    serve = PODS["serve"]["containers"][0]["readinessProbe"]["httpGet"]
    ports = {p["name"]: p["containerPort"] for p in PODS["serve"]["containers"][0]["ports"]}
    assert serve["port"] == ports["serve"] == SERVE["http_options"]["port"]
    assert serve["path"] == "/-/healthz" and SERVE["http_options"]["host"] == "0.0.0.0"
    # KubeRay labels every worker for the Service that clients use; its own probe keeps trainers, without a proxy, out of it
    assert "readinessProbe" not in PODS["train"]["containers"][0]
    for name in GROUPS:
        ports = {p["name"]: p["containerPort"] for p in PODS[name]["containers"][0]["ports"]}
        assert GROUPS[name]["rayStartParams"]["metrics-export-port"] == str(ports["metrics"])


def test_gcs_has_a_redis_of_its_own_and_both_addresses_lead_to_one() -> None:
    address = SERVICE["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisAddress"]
    (url,) = re.findall(r"PACELINE_REDIS_URL=\"?redis://:[^@]*@([^/\"]+)/0", PAGE.read_text(encoding="utf-8"))
    assert address != url
    for name, where in (("gcs-redis", address), ("redis", url)):
        service, stateful = MANIFESTS[f"{name}-address"], MANIFESTS[name]
        assert where == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
        labels = stateful["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        assert stateful["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert stateful["spec"]["serviceName"] == service["metadata"]["name"]
        memory = re.search(r"maxmemory (\d+)mb", stateful["spec"]["template"]["spec"]["containers"][0]["command"][2])
        limit = PODS[name]["containers"][0]["resources"]["limits"]["memory"]
        assert memory and int(memory[1]) * 2 <= int(limit[:-2]) * (1024 if limit.endswith("Gi") else 1), (
            "room for a copy"
        )


@pytest.mark.parametrize("name", ["redis", "gcs-redis"])
def test_redis_is_the_process_that_the_pod_ends_and_no_argument_has_its_password(
    name: str, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    container = PODS[name]["containers"][0]
    mounts = {m["mountPath"] for m in container["volumeMounts"]}
    assert mounts == {"/data", "/conf"}
    (tmp_path / "conf").mkdir()
    (tmp_path / "redis-server").symlink_to(find_redis_binary())
    *shell, command = container["command"]
    for mount in mounts:
        command = re.sub(rf"{mount}\b", str(tmp_path / mount[1:]), command)
    (tmp_path / "data").mkdir()
    port = free_port()
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "REDIS_PASSWORD": "of-the-secret"}
    with subprocess.Popen([*shell, f"{command} --port {port}"], env=environment, stdout=subprocess.DEVNULL) as server:
        client = redis.Redis(port=port, password="of-the-secret")
        wait_until(lambda: _answers(client))
        assert "of-the-secret" not in " ".join(psutil.Process(server.pid).cmdline())
        assert client.config_get("appendonly") == {"appendonly": "yes"}
        client.close()
        server.terminate()
        assert server.wait(10) == 0, "it ends by itself, not killed when its time is up"


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def test_budgets_select_the_pods_that_they_are_for() -> None:
    # KubeRay gives pods what their group has for Ray's node, too
    labels = {name: {**g["template"]["metadata"]["labels"], **g.get("labels", {})} for name, g in GROUPS.items()}
    serve = MANIFESTS["budget-serve"]["spec"]["selector"]["matchLabels"]
    assert [name for name, own in labels.items() if serve.items() <= own.items()] == ["serve"]
    single = MANIFESTS["budget-single"]["spec"]["selector"]["matchLabels"]
    for n in ("gcs-redis", "redis"):
        labels[n] = MANIFESTS[n]["spec"]["template"]["metadata"]["labels"]
    assert {name for name, own in labels.items() if single.items() <= own.items()} == {"head", "redis", "gcs-redis"}
    # Kubernetes asks the owner for its scale where maxUnavailable is above 0, and a RayCluster has none
    assert "maxUnavailable" not in MANIFESTS["budget-serve"]["spec"]
    assert not any("app.kubernetes.io/name" in g["template"]["metadata"]["labels"] for g in GROUPS.values()), (
        "the operator's own Services select by the name that it gives"
    )


def test_an_upgrade_leaves_streams_their_time() -> None:
    grace_s = SERVE["applications"][0]["deployments"][0]["graceful_shutdown_timeout_s"]
    assert SERVICE["spec"]["rayClusterDeletionDelaySeconds"] >= grace_s
