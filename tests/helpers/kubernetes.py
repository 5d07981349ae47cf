"""Kubernetes' own schemas, and what the manifests and the chart give the processes of Ray."""

from __future__ import annotations

from typing import Any

import kubernetes_validate

VERSIONS = ("1.32", kubernetes_validate.latest_version())
"""The oldest Kubernetes that manifests are written for, and the newest one that there are schemas of."""


def groups_of(service: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Groups of pods of a RayService, the head among them."""
    cluster = service["spec"]["rayClusterConfig"]
    return {"head": cluster["headGroupSpec"], **{g["groupName"]: g for g in cluster["workerGroupSpecs"]}}


def environments(service: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Group -> what the manifest itself puts into the environment of its Ray container, the first one as KubeRay has it."""
    pods = {name: group["template"]["spec"] for name, group in groups_of(service).items()}
    return {name: {e["name"]: e["value"] for e in pod["containers"][0].get("env", [])} for name, pod in pods.items()}


def faults(manifest: dict[str, Any]) -> list[str]:
    """What Kubernetes would refuse or drop in an object, in a RayService in its pods: unknown fields and wrong types."""
    objects = [manifest]
    if manifest["kind"] == "RayService":  # its other fields are the operator's
        objects = [
            {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": group["template"]}
            for name, group in groups_of(manifest).items()
        ]
    found = []
    for version in VERSIONS:
        for value in objects:
            try:
                kubernetes_validate.validate(value, version, strict=True)
            except kubernetes_validate.ValidationError as e:
                path = ".".join(str(step) for step in e.path)
                found.append(f"{value['kind']} {value['metadata']['name']}, Kubernetes {version}, {path}: {e.message}")
    return found
