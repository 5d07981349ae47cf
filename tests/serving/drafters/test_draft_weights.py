"""Two adaptive drafter slots and the hold-back's: staging, publishing, pinning, failing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.contracts import Group, is_canary
from paceline.errors import DrafterMismatchError
from paceline.serving.drafters.slots import DrafterSlots
from tests.helpers.scripted_drafters import WeightDrafter


def state(value: float, size: int = 3) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((size,), value)}


def make_slots(**kwargs) -> DrafterSlots:
    return DrafterSlots(WeightDrafter(1.0), "v1", spawn=WeightDrafter, **kwargs)


def test_a_request_keeps_the_version_it_was_admitted_with():
    slots = make_slots()
    old = slots.pin(Group.ADAPTIVE)
    assert slots.stage("v2", state(2.0))
    assert slots.pin(Group.ADAPTIVE) == ("A", "v1", -1), "staging must not change what requests get"
    slots.publish("v2")
    new = slots.pin(Group.ADAPTIVE)
    assert (old, new) == (("A", "v1", -1), ("B", "v2", -1))
    assert slots.drafter("A").weight[0] == 1.0 and slots.drafter("B").weight[0] == 2.0


def test_a_third_version_waits_for_a_free_slot_and_the_newest_wins():
    slots = make_slots()
    slot, *_ = slots.pin(Group.ADAPTIVE)
    slots.stage("v2", state(2.0))
    slots.publish()
    assert not slots.stage("v3", state(3.0))
    assert not slots.stage("v4", state(4.0))
    assert slots.waiting_version == "v4"
    slots.unpin(slot)
    assert slots.stage_waiting() and slots.waiting_version is None
    slots.publish("v4")
    assert slots.pin(Group.ADAPTIVE) == ("A", "v4", -1)
    assert slots.drafter("A").weight[0] == 4.0


def test_staging_copies_in_place():
    slots = make_slots()
    slots.stage("v2", state(2.0))
    address = slots._slots["B"].drafter.weight.data_ptr()
    slots.publish()
    slots.stage("v3", state(3.0))
    slots.publish()
    slots.stage("v4", state(4.0))
    assert slots._slots["B"].drafter.weight.data_ptr() == address


def test_a_twin_made_beforehand_takes_the_first_staged_version():
    slots = make_slots(first=WeightDrafter(1.0))
    slots.alloc(7)
    prepared = slots.prepare_all()
    assert list(prepared) == ["A", "B", "first"] and prepared["B"].num_pool_rows == 7
    assert slots.prepare_all()["B"] is prepared["B"], "made once"
    assert slots.versions() == {"A": "v1", "first": "v1"} and not slots.is_resident("")
    with pytest.raises(DrafterMismatchError):
        slots.stage("v2", state(1.0, size=4))
    slots.stage("v2", state(2.0))
    slots.publish("v2")
    assert slots.drafter("B") is prepared["B"] and prepared["B"].weight[0] == 2.0


def test_rollback_to_a_resident_version_needs_no_copy_even_while_it_is_pinned():
    slots = make_slots()
    slots.pin(Group.ADAPTIVE)
    slots.stage("v2", state(2.0))
    slots.publish()
    assert slots.stage("v1", {"weight": torch.full((3,), float("nan"))})
    slots.publish("v1")
    assert slots.live_version == "v1" and slots.drafter("A").weight[0] == 1.0


@pytest.mark.parametrize("bad", [state(float("nan")), state(float("inf")), state(1.0, size=4)])
def test_bad_weights_are_refused_before_anything_is_copied(bad):
    slots = make_slots()
    slots.stage("v2", state(2.0))
    slots.publish()
    slots.stage("v1b", state(5.0))  # into A
    with pytest.raises(DrafterMismatchError):
        slots.stage("v3", bad)
    assert slots.live_version == "v2" and slots.drafter("B").weight[0] == 2.0


def test_publishing_what_is_not_staged_is_refused():
    slots = make_slots()
    with pytest.raises(DrafterMismatchError, match="staged"):
        slots.publish("v9")


def test_only_usable_weights_of_an_adaptive_slot_are_resident():
    slots = make_slots(first=WeightDrafter(1.0))
    for version in ("v2", "v3"):
        assert slots.stage(version, state(2.0))
        slots.publish()
    assert "v1" in slots.versions().values() and not slots.is_resident("v1"), "the hold-back group's copy is its own"
    assert slots.is_resident("v2") and slots.is_resident("v3")
    slots.mark_failed("A", "test")
    assert [slots.is_resident(v) for v in ("v2", "v3")].count(True) == 1


def test_the_hold_back_group_uses_the_first_drafter():
    slots = make_slots(first=WeightDrafter(1.0))
    shared = slots.pin(Group.STATIC)
    assert shared == ("A", "v1", -1), "while the live version is the first one, both groups share a drafting pass"
    slots.stage("v2", state(2.0))
    slots.publish()
    assert slots.pin(Group.STATIC) == ("first", "v1", -1)
    assert slots.pin(Group.ADAPTIVE) == ("B", "v2", -1)


def test_plain_requests_and_engines_without_drafter_pin_nothing():
    assert make_slots().pin(Group.PLAIN) == (None, "", -1)
    empty = DrafterSlots()
    assert empty.pin(Group.ADAPTIVE) == (None, "", -1) and empty.versions() == {}
    empty.unpin(None)


def test_a_failed_slot_drafts_no_more_and_takes_no_new_requests():
    slots = make_slots()
    name, *_ = slots.pin(Group.ADAPTIVE)
    slots.mark_failed(name, "NaN")
    slots.mark_failed(name, "again")
    assert slots.drafter(name) is None and slots.num_failures == 1
    assert slots.pin(Group.ADAPTIVE) == (None, "", -1)
    assert slots.failures() == {"v1": "NaN"}
    slots.stage("v2", state(2.0))
    slots.publish()
    assert slots.pin(Group.ADAPTIVE) == ("B", "v2", -1)


def test_a_version_whose_live_slot_failed_is_drafted_with_in_the_hold_backs_slot_and_is_told_when_that_failed_too():
    slots = make_slots(first=WeightDrafter(1.0))
    slots.mark_failed("A", "NaN")
    assert slots.pin(Group.ADAPTIVE) == slots.pin(Group.STATIC) == ("first", "v1", -1) and slots.failures() == {}
    slots.mark_failed("first", "NaN")
    assert slots.pin(Group.ADAPTIVE) == (None, "", -1) and slots.failures() == {"v1": "NaN"}


def test_a_failed_version_can_be_staged_again_once_its_slot_is_idle():
    slots = make_slots()
    slots.stage("v2", state(2.0))
    slots.publish()
    slots.mark_failed("B", "NaN")
    assert slots.stage("v2", state(2.5))
    slots.publish()
    assert slots.pin(Group.ADAPTIVE) == ("A", "v2", -1)


def test_every_drafter_gets_kv_for_all_pool_rows():
    slots = make_slots(first=WeightDrafter(1.0))
    assert slots.kv_row_bytes == 30
    slots.alloc(64)
    slots.stage("v2", state(2.0))
    assert all(slots._slots[n].drafter.num_pool_rows == 64 for n in ("A", "B", "first"))


def ids_of(version: str, percent: int, is_own: bool, num: int = 5) -> list[str]:
    return [i for i in (f"r{k}" for k in range(1000)) if is_canary(i, version, percent) == is_own][:num]


def test_a_canary_serves_its_share_of_adaptive_requests_and_nobody_else():
    slots = make_slots(first=WeightDrafter(1.0))
    slots.stage("v2", state(2.0))
    slots.set_canary("v2", 10)
    assert (slots.canary_version, slots.live_version) == ("v2", "v1")
    ids = [f"r{k}" for k in range(2000)]
    served = {i: slots.pin(Group.ADAPTIVE, i) for i in ids}
    assert {i for i, (_, v, _) in served.items() if v == "v2"} == {i for i in ids if is_canary(i, "v2", 10)}
    assert 120 < sum(v == "v2" for _, v, _ in served.values()) < 280
    own = ids_of("v2", 10, True)[0]
    assert slots.pin(Group.STATIC, own)[1] == "v1" and slots.pin(Group.PLAIN, own) == (None, "", -1)
    assert slots.pin(Group.ADAPTIVE)[1] == "v1", "a request without an id is no canary"


def test_promotion_is_a_flip_and_calling_off_frees_the_slot_when_its_requests_have_ended():
    slots = make_slots()
    own = ids_of("v2", 50, True)[0]
    slots.stage("v2", state(2.0))
    slots.set_canary("v2", 50)
    name, *_ = slots.pin(Group.ADAPTIVE, own)
    assert not slots.stage("v3", state(3.0)), "the canary's slot is not idle"
    slots.set_canary("", 0)
    assert slots.pin(Group.ADAPTIVE, own)[1] == "v1"
    assert not slots.stage_waiting(), "a request is still pinned to the canary"
    slots.unpin(name)
    assert slots.stage_waiting()
    slots.set_canary("v3", 50)
    slots.stage("v3", {})  # resident: no copy
    slots.publish("v3")
    assert (slots.live_version, slots.canary_version) == ("v3", "")


def test_new_requests_of_a_failed_canary_get_the_live_version():
    slots = make_slots()
    own = ids_of("v2", 50, True)[0]
    slots.stage("v2", state(2.0))
    slots.set_canary("v2", 50)
    name, *_ = slots.pin(Group.ADAPTIVE, own)
    slots.mark_failed(name, "NaN")
    assert slots.drafter(name) is None and slots.pin(Group.ADAPTIVE, own)[1] == "v1"


def test_the_share_of_a_failed_canary_ends_with_its_weights():
    slots = make_slots()
    slots.stage("v2", state(2.0))
    slots.set_canary("v2", 50)
    slots.mark_failed("B", "NaN")
    assert slots.stage("v3", state(3.0)), "the slot of a canary that failed is idle"
    assert slots.canary_version == ""
    assert {slots.pin(Group.ADAPTIVE, i)[1] for i in ids_of("v3", 50, True)} == {"v1"}


def test_no_request_is_pinned_to_a_slot_while_its_weights_are_overwritten():
    pinned = []

    class WatchedDrafter(WeightDrafter):
        def load_state(self, state):
            pinned.append(slots.pin(Group.STATIC))
            super().load_state(state)

    slots = DrafterSlots(WatchedDrafter(1.0), "v1", spawn=WeightDrafter)
    slots.stage("v2", state(2.0))
    slots.publish("v2")
    assert slots.pin(Group.STATIC) == ("A", "v1", -1)
    slots.unpin("A")
    assert slots.stage("v3", state(3.0)), "the slot of the version before is idle"
    assert pinned == [(None, "", -1)], "half of v3 must not pass for v1"
    assert slots.versions()["A"] == "v3"


def test_weights_whose_copy_broke_off_are_used_by_nobody():
    class BreakingDrafter(WeightDrafter):
        def load_state(self, state):
            self.weight[:1] = state["weight"][:1]
            raise RuntimeError("out of memory")

    slots = DrafterSlots(BreakingDrafter(1.0), "v1", spawn=WeightDrafter)
    slots.stage("v2", state(2.0))
    slots.publish("v2")
    with pytest.raises(RuntimeError):
        slots.stage("v3", state(3.0))
    assert slots.pin(Group.STATIC) == (None, "", -1) and "out of memory" in slots.failures()["v1"]


def test_what_is_not_resident_or_is_live_cannot_be_a_canary():
    slots = make_slots()
    for version in ("v9", "v1"):
        with pytest.raises(DrafterMismatchError, match="canary"):
            slots.set_canary(version, 10)


@given(
    st.lists(
        st.tuples(st.sampled_from(["pin", "unpin", "stage", "publish", "canary", "off", "fail"]), st.integers(0, 99))
    )
)
def test_pins_balance_and_hold_their_version_through_any_sequence_of_canaries_and_failures(operations):
    slots = make_slots(first=WeightDrafter(1.0))
    pins: list[tuple[str | None, str]] = []
    number = 1
    for name, value in operations:
        if name == "pin":
            group = Group.STATIC if value % 5 == 0 else Group.PLAIN if value % 5 == 1 else Group.ADAPTIVE
            pins.append(slots.pin(group, f"r{value}"))
        elif name == "unpin" and pins:
            slots.unpin(pins.pop(value % len(pins)).slot)
        elif name == "stage":
            number += 1
            slots.stage(f"v{number}", state(float(number)))
        elif name == "publish" and slots._staged is not None:
            slots.publish()
        elif name == "canary" and slots._staged is not None and slots._staged != slots._live:
            slots.set_canary(slots._slots[slots._staged].version, value)
        elif name == "off":
            slots.set_canary("", 0)
        elif name == "fail" and value % 7 == 0:
            slots.mark_failed(slots._live, "test")
        held = slots.versions()
        assert all(held[slot] == version for slot, version, _ in pins if slot is not None)
        drafted = [(slots.drafter(slot), version) for slot, version, _ in pins]
        assert all(float(d.weight[0]) == float(v[1:]) for d, v in drafted if d is not None), (
            "a failed one drafts nothing"
        )
        assert sum(slots.num_pins().values()) == sum(slot is not None for slot, *_ in pins)
        assert len(held) <= 3 and slots.canary_version != slots.live_version
