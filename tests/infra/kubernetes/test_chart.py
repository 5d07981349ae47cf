"""The chart prints the manifests as they are, changes what its values say and refuses names that lead nowhere."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline import __version__
from paceline.config import ServiceConfig
from paceline.infra.app import SERVE_SETTINGS
from paceline.records import build as build_record
from tests.helpers.kubernetes import environments, faults, groups_of

CHART = Path(__file__).resolve().parents[3] / "infra" / "kubernetes"
HELM = shutil.which("helm")
needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not installed")


def helm(*args: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run([HELM, *args], capture_output=True, text=True, timeout=60)


def render(tmp_path: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    done = helm("template", "paceline", str(CHART), "-f", str(file))
    assert done.returncode == 0, done.stderr
    return [with_serve(d) for d in yaml.safe_load_all(done.stdout) if d]


def with_serve(manifest: dict[str, Any]) -> dict[str, Any]:
    """A RayService's Serve configuration as values: how it is laid out as text is no part of it."""
    if manifest["kind"] == "RayService":
        manifest["spec"]["serveConfigV2"] = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    return manifest


def plain() -> list[dict[str, Any]]:
    return [with_serve(yaml.safe_load(p.read_text(encoding="utf-8"))) for p in sorted(CHART.glob("manifests/*.yaml"))]


def key(manifest: dict[str, Any]) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def service_of(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    return next(m for m in manifests if m["kind"] == "RayService")


def test_the_chart_has_the_packages_version_and_every_value_is_used() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["version"] == chart["appVersion"] == __version__
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    template = (CHART / "templates" / "manifests.yaml").read_text(encoding="utf-8")
    assert all(f".Values.{name}" in template for name in values)


@needs_helm
def test_without_values_the_chart_is_the_manifests(tmp_path: Path) -> None:
    assert sorted(render(tmp_path, {}), key=key) == sorted(plain(), key=key)
    assert helm("lint", "--strict", str(CHART)).returncode == 0


@needs_helm
def test_values_change_what_they_name_and_nothing_else(tmp_path: Path) -> None:
    changed = render(tmp_path, {
        "image": "registry/paceline:1", "groups": {"serve": {"replicas": 2, "minReplicas": 2}},
        "resources": {"head": {"limits": {"memory": "8Gi"}}}, "nodeSelector": {"train": {"pool": "spot"}},
        "service": {"num_replicas": 2, "engine": {"max_running": 16}}, "deployment": {"max_queued_requests": 7},
        "patches": {"storage": {"spec": {"storageClassName": "efs"}}},
    })  # fmt: skip
    spec, before = service_of(changed)["spec"], service_of(plain())["spec"]
    cluster = spec["rayClusterConfig"]
    pods = [cluster["headGroupSpec"]["template"]["spec"], *(g["template"]["spec"] for g in cluster["workerGroupSpecs"])]
    assert {p["containers"][0]["image"] for p in pods} == {"registry/paceline:1"}
    assert pods[0]["containers"][0]["resources"]["limits"] == {"memory": "8Gi"}
    assert [p.get("nodeSelector") for p in pods] == [None, None, {"pool": "spot"}]
    serve = cluster["workerGroupSpecs"][0]
    assert (serve["replicas"], serve["minReplicas"], serve["maxReplicas"]) == (2, 2, 3)
    app = spec["serveConfigV2"]["applications"][0]
    config = build_record(ServiceConfig, app["args"])
    assert config.num_replicas == 2 and "num_replicas" not in app["deployments"][0]
    assert config.engine.max_running == 16 and app["deployments"][0]["max_queued_requests"] == 7
    was = before["serveConfigV2"]["applications"][0]["args"]
    assert (
        config.engine.max_waiting == was["engine"]["max_waiting"]
        and config.engine.kv_bytes == was["engine"]["kv_bytes"]
    )
    (claim,) = [m for m in changed if m["kind"] == "PersistentVolumeClaim"]
    assert claim["spec"]["storageClassName"] == "efs" and claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert "groupName" not in cluster["headGroupSpec"]


@needs_helm
@pytest.mark.parametrize(
    "values", [{}, {"image": "registry/paceline:1", "groups": {"serve": {"replicas": 2}}, "resources": {"train": {"limits": {"memory": "8Gi"}}}}]
)  # fmt: skip
def test_what_the_chart_prints_fits_kubernetes_and_every_ray_has_its_settings(tmp_path: Path, values: dict) -> None:
    rendered = render(tmp_path, values)
    assert [x for manifest in rendered for x in faults(manifest)] == []
    service, before = service_of(rendered), groups_of(service_of(plain()))
    assert environments(service) == dict.fromkeys(before, SERVE_SETTINGS)
    labels = {name: group.get("labels") for name, group in groups_of(service).items()}
    assert labels == {name: group.get("labels") for name, group in before.items()}


@needs_helm
@pytest.mark.parametrize(
    ("values", "message"),
    [({"groups": {"server": {}}}, "server"), ({"resources": {"gpu": {}}}, "gpu"), ({"patches": {"storge": {}}}, "storge")],
)  # fmt: skip
def test_a_name_that_leads_nowhere_is_refused(tmp_path: Path, values: dict, message: str) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    done = helm("template", "paceline", str(CHART), "-f", str(file))
    assert done.returncode != 0 and message in done.stderr
