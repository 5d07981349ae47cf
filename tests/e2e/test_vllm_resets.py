"""A real vLLM with `stale_prefix: reset`; skipped without `make test-vllm`."""

import json
import os
import subprocess
from pathlib import Path

from paceline.adapt.versions.export_drafter import ExportDrafterOptions, export_drafter
from paceline.contracts import ASKED_GROUP, Group
from paceline.paths import bundled
from tests.helpers import vllm_resets
from tests.helpers.vllm_python import PYTHON, vllm_marks

pytestmark = vllm_marks(600)
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1",
}  # fmt: skip


def test_prefixes_of_another_drafter_are_evidence_of_nothing_where_the_cache_could_not_be_emptied(tmp_path):
    """vLLM empties its prefix cache only where no request runs."""
    export_drafter(ExportDrafterOptions(version="eagle3", format="vllm", out=tmp_path / "drafter"))
    around = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    out = subprocess.run(
        [PYTHON, str(Path(vllm_resets.__file__)), str(bundled("target")), str(tmp_path / "drafter"), str(tmp_path / "data")],
        env={**around, **ENVIRONMENT}, stdout=subprocess.PIPE, text=True, check=True,
    ).stdout  # fmt: skip
    under_load, idle = json.loads(out.rpartition(vllm_resets.MARK)[2])
    assert under_load == [1, [ASKED_GROUP] * 2], "one lived through the switch, the other began behind it"
    assert idle == [1, [Group.ADAPTIVE]]
