"""The wheel holds exactly the package, and an installation shadows nobody else's `kernels`."""

import shutil
import subprocess
import sys
import zipfile

import pytest

from paceline.paths import BUNDLED_DRAFTERS, SMOLLM2
from tests.helpers.wheel import ROOT, build_wheel

FOLDERS = ("kernels", "serving", "bandit", "adapt", "infra", "bench")
MAX_TOY_BYTES, MAX_SMOLLM2_BYTES = 26 * 10**6, 32 * 10**6
"""The bundled target with its drafters; all drafters of SmolLM2."""


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory):
    wheel = build_wheel(tmp_path_factory.mktemp("wheel"))
    assert "-py3-none-" in wheel.name, "the library depends on no version of Python"
    return set(zipfile.ZipFile(wheel).namelist())


def _tracked(folder: str, target: str) -> set[str]:
    return {f"{target}/{p.relative_to(ROOT / folder)}" for p in (ROOT / folder).rglob("*.py")}


@pytest.mark.slow
def test_wheel_holds_every_module_and_only_under_paceline(wheel_names):
    expected = _tracked("paceline", "paceline") | {n for f in FOLDERS for n in _tracked(f, f"paceline/{f}")}
    modules = {n for n in wheel_names if n.endswith(".py")}
    assert modules == expected
    assert {n.split("/")[0] for n in wheel_names if ".dist-info" not in n} == {"paceline"}


@pytest.mark.slow
def test_wheel_holds_the_compiled_round_and_its_source(wheel_names):
    folder = "paceline/kernels/cpu"
    assert {f"{folder}/{name}" for name in ("round.cpp", "round.h", "threads.cpp", "isa.cpp")} <= wheel_names
    if shutil.which("c++"):
        assert f"{folder}/libround.so" in wheel_names


@pytest.mark.slow
def test_wheel_holds_bundled_models_and_prompts(wheel_names):
    for path in [*(ROOT / "paceline" / "models").rglob("*"), *(ROOT / "paceline" / "prompts").glob("*.jsonl")]:
        if path.is_file():
            assert str(path.relative_to(ROOT)) in wheel_names


@pytest.mark.slow
def test_wheel_holds_the_dashboard_and_the_files_of_operators(wheel_names):
    for folder in (
        "page",
        "kubernetes",
        *(f"kubernetes/{name}" for name in ("container", "grafana", "manifests", "templates")),
    ):
        files = [p for p in (ROOT / "infra" / folder).iterdir() if p.is_file()]
        assert files and {f"paceline/infra/{folder}/{p.name}" for p in files} <= wheel_names


def test_bundled_models_stay_small_and_are_those_that_have_a_name():
    folder = ROOT / "paceline" / "models"
    sizes = {p: p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    smollm2 = sum(size for p, size in sizes.items() if folder / SMOLLM2 in p.parents)
    assert smollm2 <= MAX_SMOLLM2_BYTES and sum(sizes.values()) - smollm2 <= MAX_TOY_BYTES
    assert {p.name for p in folder.iterdir()} <= {"target", SMOLLM2, *BUNDLED_DRAFTERS}


def test_hugging_face_kernels_is_not_shadowed_by_our_folder(tmp_path):
    site = tmp_path / "site"
    (site / "kernels").mkdir(parents=True)
    (site / "kernels" / "__init__.py").write_text("WHOSE = 'hugging face'\n")
    code = f"import sys; sys.path.append({str(site)!r}); import kernels; print(kernels.WHOSE)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "hugging face", done.stderr


def test_importing_the_vocabulary_does_not_load_torch():
    code = "import sys, paceline.contracts, paceline.config, paceline.cli.main; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
