"""Claims of infra/state/manifest_facts.py."""

from paceline.contracts import DrafterManifest
from paceline.infra.state.manifest_facts import learned_rows, shadow_lengths


def manifest(version: str, parent: str | None = None, bucket: str | None = None, config=None, **metrics):
    return DrafterManifest(
        version=version, sha256="0" * 64, num_bytes=1, drafter_type="specblock", config=config or {}, shapes_hash="",
        target_version="t", parent=parent, arm="head", bucket=bucket, num_train_rows=700, metrics=metrics,
        created=float(version[1:]),
    )  # fmt: skip


FIRST = manifest("v1", config={"learned_rows": {"tools": 1000, "code": 500}})
SECOND = manifest("v2", "v1", "math", FIRST.config, num_fresh_rows=400, acceptance_length=2.5, incumbent_acceptance_length=2.0)  # fmt: skip
THIRD = manifest("v3", "v2", "math", FIRST.config, acceptance_length=3.0, incumbent_acceptance_length=2.4)


def test_a_version_has_learned_what_its_ancestors_learned_and_its_own_bucket():
    assert learned_rows([THIRD, SECOND, FIRST]) == {
        "v1": {"tools": 1000, "code": 500},
        "v2": {"tools": 1000, "code": 500, "math": 400},
        "v3": {"tools": 1000, "code": 500, "math": 1100},
    }


def test_metrics_win_over_the_config_and_absence_is_no_error():
    assert learned_rows([manifest("v1", config={"learned_rows": {"code": 1}}, learned_rows={"code": 2})]) == {
        "v1": {"code": 2}
    }
    assert learned_rows([manifest("v1"), manifest("v2", config={"learned_rows": "many"})]) == {}


def test_a_lost_parent_or_a_circle_of_parents_does_not_stop_the_count():
    assert learned_rows([SECOND]) == {"v2": {"math": 400}}
    circle = [manifest("v1", "v2", "math", num_fresh_rows=1), manifest("v2", "v1", "math", num_fresh_rows=1)]
    assert set(learned_rows(circle)) == {"v1", "v2"}


def test_replay_scores_are_the_newest_of_each_version():
    assert shadow_lengths([THIRD, SECOND, FIRST]) == {"math": {"v1": 2.0, "v2": 2.4, "v3": 3.0}}
