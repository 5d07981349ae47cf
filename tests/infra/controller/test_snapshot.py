"""Claims of infra/controller/snapshot.py and view.py: what GET /paceline/state says is a public format."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from paceline.infra.controller.snapshot import Snapshot, parse_state, state_json
from paceline.infra.state.redis_clients import Keys
from tests.helpers.dashboard_host import FIRST, Scene, make_scene

TRIED = "c0a1b2c3d4e5"
SUMS = "rounds tokens acceptance_length acceptance_rate tokens_per_s"
CELL = "bucket arm version training_s shadow_s interference_s staging_s saving_s spent_s saved_s saved_low_s saved_high_s net_s num_entries"  # fmt: skip
DECISION = "decision_id ts bucket action arm version policy context expected_gain expected_saving_s expected_cost_s propensity reason realised_gain realised_saving_s realised_cost_s outcome"  # fmt: skip
ENTRY = "entry_id ts kind bucket version seconds arm standard_error_s"
GOLDEN = {
    "": (
        "ts age_s model target_version epoch commit gen version first_version holdback_percent class_versions history versions policy "
        "is_paused notes decisions ledger ledger_cells saved_interval_s ledger_entries buckets rows class_shares job swaps "
        "rollout lifecycle evicted replicas feedback bandit redis_up is_redis_full folder_error folder_hung_s folder_hangs read_only is_fenced errors replica latency target "
        "has_controller is_adaptive"
    ),
    "versions": (
        "version sha256 num_bytes drafter_type shapes_hash target_version parent arm bucket num_train_rows delta_of "
        "metrics created"
    ),
    "notes": "ts text",
    "decisions": DECISION,
    "ledger": "spent_s saved_s net_s by_kind",
    "ledger_cells": CELL,
    "ledger_entries": ENTRY,
    "buckets.math": "adaptive static plain recent",
    "buckets.math.adaptive": SUMS,
    "buckets.math.recent.static": SUMS,
    "job": "job_id bucket arm since decision_id",
    "swaps": "count pause_ms times",
    "rollout": (
        "status frozen_until guards last alpha margin version incumbent share_percent since num_requests strata reason"
    ),
    "rollout.last": "version outcome reason ts num_requests",
    "lifecycle.*": "state since bucket arm was_live transitions",
    "lifecycle.*.transitions": "version before after reason ts",
    "replicas": (
        "replica_id gen version slots failed_gen failed_reason swap_pause_ms staging_s counters ts swap_gen "
        "canary_version failures errors class_versions refused engine target_version"
    ),
    "feedback": "produced delivered dropped duplicates missing_batches lost_entries lag",
    "errors": "count last",
    "bandit": (
        "policy epoch pinned barred beliefs scores regime_age_s horizon_s regime_starts arms posterior drift_alarms "
        "ledger bank_s job slowdown num_decisions num_jobs_learned num_rows_dropped"
    ),
    "bandit.beliefs.math": (
        "bucket load time_per_token_s round_s plain_token_s length length_se usable_rows fresh_rows learned_rows first_rows learner_rows learner_parameters unsure is_tried "
        "required_rows is_active batches"
    ),
    "bandit.posterior": "arm bucket mean low high prior_mean prior_low prior_high",
    "bandit.ledger": "training shadow staging saving spent_s saved_s saved_error_s net_s saved_interval_s cells",
    "bandit.ledger.cells": CELL,
    "replica": (
        "replica_id pid gen version first_version slots pins waiting failures class_versions failed_gen failed_reason num_swaps "
        "pause_ms engine training speculation"
    ),
}
"""Place in the document of a service that has adapted -> its keys."""
CANARY = "status frozen_until guards last alpha margin version incumbent share_percent since bucket scope arm decision_id num_requests num_canary_requests num_drafted_rounds min_drafted_rounds num_open num_excluded num_errors ratio log_evidence evidence_against thresholds strata reason"  # fmt: skip


@pytest.fixture(scope="module")
def scene(shared_redis) -> Iterator[Scene]:
    made = make_scene(shared_redis.url, Keys(uuid.uuid4().hex[:8]))
    made.run(300, ["code", "math"])
    made.command("set_bank", 60.0)
    yield made
    made.client.close()


def found_at(document: Any, place: str) -> Any:
    """The object at a place; of a list its first element, for * the latest value."""
    for name in place.split(".") if place else []:
        document = list(document.values())[-1] if name == "*" else document[name]
        if isinstance(document, list):
            document = document[0]
    return document


@pytest.mark.parametrize("place", [place for place in GOLDEN if place != "job"])
def test_document_of_a_service_that_has_adapted_has_exactly_these_keys(scene: Scene, place: str) -> None:
    document = msgspec.json.decode(msgspec.json.encode(state_json(scene.state())))
    assert set(found_at(document, place)) == set(GOLDEN[place].split())


def test_document_decodes_into_the_record_it_was_made_from(scene: Scene) -> None:
    state = scene.state()
    assert parse_state(msgspec.json.encode(state_json(state))) == state


def test_version_on_trial_shows_its_numbers(shared_redis) -> None:
    scene = make_scene(shared_redis.url, Keys(uuid.uuid4().hex[:8]), policy="never")
    scene.run(30, ["math"])
    fresh = state_json(scene.state())["rollout"]
    assert (fresh["status"], fresh["last"], fresh["version"]) == ("idle", {}, None)
    scene.launcher.registry.add(TRIED, parent=FIRST, arm="head", bucket="math", created=scene.clock.now())
    scene.command("canary", TRIED)
    scene.run(60, ["math"])
    state = scene.state()
    document = state_json(state)
    assert set(document["rollout"]) == set(CANARY.split()) and document["rollout"]["status"] == "canary"
    assert set(document["buckets"]["math"]) == {"adaptive", "static", "plain", "canary", "recent"}
    assert (
        set(document["rollout"]["log_evidence"]) == set(document["rollout"]["thresholds"]) == {"slower", "fast_enough"}
    )
    assert parse_state(msgspec.json.encode(document)) == state
    scene.client.close()


def test_replica_without_a_controller_says_only_what_it_knows(scene: Scene) -> None:
    scene.is_away = True
    try:
        document = state_json(scene.state())
    finally:
        scene.is_away = False
    assert set(document) == {"gen", "version", "first_version", "replica", "target", "target_version", "model", "has_controller", "is_adaptive", "redis_up", "read_only", "feedback", "latency"}  # fmt: skip
    assert set(document["feedback"]) == {"produced", "delivered", "dropped"}
    assert parse_state(msgspec.json.encode(document)).version == FIRST


def test_everything_has_a_value_before_anything_is_known() -> None:
    assert Snapshot() == parse_state(b"{}")
