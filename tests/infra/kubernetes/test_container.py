"""The container file copies what the package is built from, and the compose file starts what the code has."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import ray
import yaml

from paceline.config import VARIABLES
from paceline.infra.web.metrics import CONTROLLER_METRICS
from tests.helpers.house import TOPS

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "infra" / "kubernetes" / "container"
FILE = (FOLDER / "Containerfile").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]


def serve_options() -> set[str]:
    (line,) = [x for x in (ROOT / "tests" / "commands.txt").read_text().splitlines() if x.startswith("serve:")]
    return set(re.findall(r"--[a-z-]+", line))


def test_every_source_of_the_build_exists_and_none_is_missing() -> None:
    copied = [w for line in re.findall(r"^COPY (.*)$", FILE, re.M) for w in line.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    assert {name for name in copied if (ROOT / name).is_dir()} == set(TOPS)
    assert {"pyproject.toml", "setup.py", "constraints.txt", "README.md", "LICENSE", "NOTICE"} <= set(copied)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert not {name.split("/")[0] for name in copied} & set(ignored)


def test_ray_is_the_same_in_base_pip_and_here() -> None:
    assert set(re.findall(r"\bray(?:\[[a-z,]*\]==|:)(\d+\.\d+\.\d+)", FILE)) == {ray.__version__}


def test_image_and_cluster_have_what_the_configuration_may_ask_for() -> None:
    """Stores in s3, a collector of traces and, where no Redis is named, one of the service's own."""
    (image,) = re.findall(r'"/opt/paceline\[([a-z0-9,]+)\]"', FILE)
    (setup,) = yaml.safe_load((ROOT / "ray_cluster.yaml").read_text(encoding="utf-8"))["setup_commands"]
    (cluster,) = re.findall(r'"\$HOME/paceline-source\[([a-z0-9,]+)\]"', setup)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {"embedded", "otel", "s3"} == set(image.split(",")) <= set(extras)
    assert {"otel", "s3"} == set(cluster.split(",")), "a cluster's Redis is named"


def test_commands_are_commands_of_the_program() -> None:
    (default,) = re.findall(r"^CMD (\[.*\])$", FILE, re.M)
    for words in (yaml.safe_load(default), SERVICES["paceline"]["command"]):
        assert words[:2] == ["paceline", "serve"]
        assert {w for w in words if w.startswith("--")} <= serve_options()
        assert "--host" in words and words[words.index("--host") + 1] == "0.0.0.0"
    assert "USER 1000:100" in FILE.splitlines(), "not root"


def test_the_service_gets_every_variable_and_no_port_is_open_to_others() -> None:
    environment = SERVICES["paceline"]["environment"]
    assert {VARIABLES[name] for name in VARIABLES if name != "token_file"} <= set(environment)
    assert {name for name in environment if name.startswith("PACELINE_")} <= set(VARIABLES.values())
    for name in ("PACELINE_API_TOKEN", "PACELINE_ADMIN_TOKEN"):
        assert environment[name].startswith(f"${{{name}:?"), "without a token nothing starts"
    published = [p for s in SERVICES.values() for p in s.get("ports", [])]
    assert published and all(p.startswith("127.0.0.1:") for p in published)
    assert re.fullmatch(r"redis://(\w+):6379/0", environment["PACELINE_REDIS_URL"])[1] in SERVICES


def test_every_file_that_is_mounted_exists_and_every_volume_is_declared() -> None:
    for service in SERVICES.values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (FOLDER / source).resolve().is_file(), source
            else:
                assert source in COMPOSE["volumes"]
    build = SERVICES["paceline"]["build"]
    assert (FOLDER / build["context"]).resolve() == ROOT and (ROOT / build["dockerfile"]) == FOLDER / "Containerfile"


def test_prometheus_scrapes_the_service_with_its_token_and_knows_the_rules() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text(encoding="utf-8"))
    (job,) = config["scrape_configs"]
    host, port = job["static_configs"][0]["targets"][0].split(":")
    words = SERVICES["paceline"]["command"]
    assert host in SERVICES and port == words[words.index("--port") + 1]
    secret = Path(job["authorization"]["credentials_file"]).name
    assert secret in SERVICES["prometheus"]["secrets"]
    assert COMPOSE["secrets"][secret] == {"environment": VARIABLES["api_token"]}
    mounted = {m.split(":")[1] for m in SERVICES["prometheus"]["volumes"]}
    assert set(config["rule_files"]) <= mounted
    assert CONTROLLER_METRICS and job["metrics_path"] == "/metrics"


def test_grafana_finds_its_source_and_the_board() -> None:
    (source,) = yaml.safe_load((FOLDER / "grafana_source.yaml").read_text(encoding="utf-8"))["datasources"]
    host, port = source["url"].removeprefix("http://").split(":")
    assert host in SERVICES and any(p.endswith(f":{port}") for p in SERVICES[host]["ports"])
    (boards,) = yaml.safe_load((FOLDER / "grafana_boards.yaml").read_text(encoding="utf-8"))["providers"]
    places = {m.split(":")[1] for m in SERVICES["grafana"]["volumes"]}
    assert any(place.startswith(boards["options"]["path"]) for place in places)


def test_health_is_asked_where_the_service_answers() -> None:
    words = shlex.join(SERVICES["paceline"]["healthcheck"]["test"])
    assert ":8000/readyz" in words and (ROOT / "serving" / "api" / "app.py").read_text().count('"/readyz"') == 1
