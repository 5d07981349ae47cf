"""What a closed epoch makes of the load: quiet times, few requests, buckets that come and go, state of before."""

import msgspec
import numpy as np
import pytest

from paceline.bandit.beliefs.belief import FAST, epoch_weight
from paceline.bandit.controller.controller import Controller, HostContext
from paceline.bandit.controller.epoch import bucket_beliefs, pooled_beliefs
from paceline.bandit.policies.pricing import price_recalls
from paceline.config import PolicyConfig
from paceline.contracts import (
    CellSums,
    FeedbackSums,
    LedgerEntry,
    RequestSums,
    RoundMean,
    ShadowScore,
    SizeSums,
    TrainResult,
)
from paceline.machine import ManualClock

EPOCH_S = 10.0
TOKENS = 40
"""Of a request; it takes 20 rounds of 10 ms, if no other number is given."""


class _Service:
    def __init__(self) -> None:
        self.clock = ManualClock(0.0)
        self.controller = Controller(
            PolicyConfig(policy="never", epoch_s=EPOCH_S), clock=self.clock, rng=np.random.default_rng(0)
        )
        self.seq = 0
        self.context = HostContext(live_version="v0", first_version="v0", rows={}, rows_written={}, versions=["v0"])
        self.controller.tick(0.0, self.context)

    def epoch(
        self, is_drafted: bool = True, num_rounds: int = 20, draft_ratio: float = 0.0, **requests: int
    ) -> dict[str, float]:
        """Serve one epoch with so many requests a bucket; load by bucket as believed after it. Plain rounds take 4 ms."""
        self.seq += 1
        if not is_drafted:
            return self._serve([_plain_cell(self.seq, b, n, draft_ratio) for b, n in requests.items() if n])
        cells = [
            CellSums(
                bucket=b, group="adaptive", version="v0",
                sizes={1: SizeSums(
                    num_rounds=num_rounds * n, drafted_rounds=num_rounds * n, drafted_s=0.01 * num_rounds * n,
                    num_tokens=TOKENS * n,
                )},
                requests={
                    f"{self.seq}.{b}.{i}": RequestSums(0.01 * num_rounds, TOKENS, num_rounds, TOKENS) for i in range(n)
                },
            )
            for b, n in requests.items()
            if n
        ]  # fmt: skip
        return self._serve(cells)

    def _serve(self, cells: list[CellSums]) -> dict[str, float]:
        self.controller.observe(FeedbackSums(cells=cells))
        self.clock.advance(EPOCH_S)
        self.controller.tick(self.clock.now(), self.context)
        return self.loads()

    def loads(self) -> dict[str, float]:
        return {b: m.load for b, m in self.controller._state.meters.items()}


def _plain_cell(seq: int, bucket: str, num: int, draft_ratio: float) -> CellSums:
    return CellSums(
        bucket=bucket, group="adaptive", version="v0", sizes={1: SizeSums(
            num_rounds=TOKENS * num, plain_s=0.004 * TOKENS * num, num_tokens=TOKENS * num, plain_tokens=TOKENS * num,
            draft_ratio=draft_ratio,
        )},
        requests={f"{seq}.{bucket}.{i}": RequestSums(0.004 * TOKENS, TOKENS, TOKENS, TOKENS) for i in range(num)},
    )  # fmt: skip


def test_a_bucket_that_was_never_drafted_for_has_a_price_from_its_first_epoch():
    """Drafting is off where it does not pay: its length is anything between 1 and what would pay."""
    service = _Service()
    service.epoch(is_drafted=False, a=20)
    state = service.controller._state
    assert not bucket_beliefs(state, PolicyConfig(), service.context)  # its engines foretell nothing
    service.epoch(is_drafted=False, draft_ratio=1.6, a=20)
    belief = bucket_beliefs(state, PolicyConfig(), service.context)["a"]
    assert belief.is_active and belief.round_s == pytest.approx(0.0064) and belief.plain_token_s == pytest.approx(0.004)
    assert belief.length == pytest.approx(1.3) and belief.length_se == pytest.approx(0.6 / 12**0.5)
    assert belief.relative_gain(belief.length, 1.6) == pytest.approx(0.0)
    assert belief.relative_gain(belief.length, 3.2) == pytest.approx(0.5)
    for _ in range(4):  # 4 rounds a request, of 10 ms
        service.epoch(num_rounds=4, a=1000)
    seen = bucket_beliefs(state, PolicyConfig(), service.context)["a"]
    assert seen.round_s == pytest.approx(0.010, rel=0.03) and seen.length == pytest.approx(TOKENS / 4, rel=0.05)


@pytest.mark.parametrize(("kept", "is_sure"), [((30, 15), False), ((22, 23), True)])
def test_what_a_few_rounds_said_is_held_against_a_rest_of_drafting(kept, is_sure):
    """Rounds of 10 ms pay above 2.5 tokens where plain ones take 4 ms: what rests lies somewhere below."""
    service = _Service()
    service._serve([
        CellSums(
            bucket="a", group="adaptive", version="v0",
            sizes={1: SizeSums(num_rounds=20, drafted_rounds=20, drafted_s=0.2, num_tokens=sum(kept))},
            requests={f"{i}": RequestSums(0.1, k, 10, k) for i, k in enumerate(kept)},
        )
    ])  # fmt: skip
    state = service.controller._state
    seen = state.table.estimate("a", "v0")

    def believed() -> tuple[float, float]:
        belief = bucket_beliefs(state, PolicyConfig(), service.context)["a"]
        return belief.length, belief.length_se

    assert believed() == seen and seen[0] == pytest.approx(2.25), "they were all drafted"
    for _ in range(3):
        service.epoch(is_drafted=False, a=20)
    length, error = believed()
    assert error < seen[1] and state.table.estimate("a", "v0") == seen
    assert (1.75 < length < 2.05) != is_sure and (length == pytest.approx(2.25, rel=0.01)) == is_sure
    for version in ("v0", "v1"):
        state.table.set_shadow("a", version, 2.25, 30)
    (recall,) = price_recalls(
        bucket_beliefs(state, PolicyConfig(), service.context), ["v0", "v1"], service.context.version_of,
        table=state.table, horizon_s=100.0, staging_s=0.1,
    )  # fmt: skip
    assert recall.gain == pytest.approx(0.0), "versions are compared by what each of them was seen to do"


@pytest.mark.parametrize("num_epochs", [1, 5, 100])
def test_a_bucket_that_is_not_drafted_for_keeps_its_price_of_drafting(num_epochs):
    """Where drafting does not pay, a better drafter may: the controller must still see what it would be worth."""
    service = _Service()
    service.epoch(a=20)
    for _ in range(num_epochs):
        service.epoch(is_drafted=False, a=20)
    state = service.controller._state
    belief = bucket_beliefs(state, PolicyConfig(), service.context)["a"]
    assert belief.is_active and belief.round_s == pytest.approx(0.010)
    assert belief.plain_token_s == pytest.approx(0.004, rel=0.2)
    # Rounds of 10 ms: 2 tokens a round lose to plain decoding, 4 win.
    assert belief.token_s(2.0) == pytest.approx(0.004, rel=0.2)
    assert belief.token_s(4.0) == pytest.approx(0.0025, rel=0.01)


@pytest.mark.parametrize("idle", [0, 1, 30])
def test_a_quiet_start_does_not_hide_the_load_that_follows(idle):
    service = _Service()
    for _ in range(idle):
        service.epoch()
    assert service.epoch(a=20)["a"] == pytest.approx(80.0)


def test_load_falls_when_traffic_stops_and_is_back_with_it():
    service = _Service()
    for _ in range(10):
        service.epoch(a=20)
    for _ in range(60):
        service.epoch()
    assert service.loads()["a"] < 8.0
    for _ in range(8):
        loads = service.epoch(a=20)
    assert loads["a"] > 60.0


@pytest.mark.parametrize("requests", [2, 4, 20, 100])
def test_a_complete_change_of_the_mix_is_seen_whatever_the_load(requests):
    service = _Service()
    for _ in range(6):
        service.epoch(b=requests)
    seen = None
    for i in range(40):
        loads = service.epoch(a=requests)
        if seen is None and loads["b"] == 0.0:
            seen = i
    assert seen is not None and seen <= 14
    assert loads["a"] == pytest.approx(4.0 * requests, rel=0.1)


def test_a_bucket_that_joins_does_not_double_the_load():
    service = _Service()
    for _ in range(45):
        service.epoch(b=4)
    totals = [sum(service.epoch(a=4).values()) for _ in range(10)]
    assert max(totals) < 1.3 * 16.0


def test_the_height_of_the_load_is_not_taken_from_one_noisy_epoch():
    service, rng = _Service(), np.random.default_rng(0)
    loads = []
    for i in range(200):
        name = "a" if (i // 50) % 2 == 0 else "b"
        loads.append(service.epoch(**{name: int(rng.poisson(3))}).get(name, 0.0))
    settled = [x for i, x in enumerate(loads) if i % 50 > 15]
    assert np.mean(settled) == pytest.approx(12.0, rel=0.2) and max(settled) < 24.0


def test_the_weight_of_an_epoch_grows_with_its_requests_and_length_up_to_a_limit():
    assert epoch_weight(0, 0.0) == 0.0 and epoch_weight(1000, 1.0) == pytest.approx(FAST)
    assert epoch_weight(0, 1e6) == pytest.approx(FAST)
    assert epoch_weight(2, 10.0) < epoch_weight(8, 10.0) < epoch_weight(20, 10.0)
    # two short epochs weigh as much as one of both together
    assert (1 - epoch_weight(5, 1.0)) ** 2 == pytest.approx(1 - epoch_weight(10, 2.0))


def test_a_belief_is_about_the_version_that_its_bucket_has_and_one_that_an_operator_assigned_is_not_active():
    service = _Service()
    service.epoch(a=20, b=20)
    state = service.controller._state
    assert all(b.is_active for b in bucket_beliefs(state, PolicyConfig(), service.context).values())
    own = msgspec.structs.replace(service.context, class_versions={"a": "v0", "b": "v9"}, assigned=["a"])
    beliefs = bucket_beliefs(state, PolicyConfig(), own)
    assert list(beliefs) == ["a"] and not beliefs["a"].is_active, "nothing is known of v9 on b"


def test_buckets_that_were_one_are_believed_to_be_one_while_they_have_one_version():
    service = _Service()
    for _ in range(3):
        service.epoch(a=20, b=10, c=10)
    state, rows = service.controller._state, {"a": 1000, "b": 3000, "c": 500}
    context = msgspec.structs.replace(service.context, rows=rows, rows_written=rows, pools={"a": "a", "b": "a"})
    each = bucket_beliefs(state, PolicyConfig(), context)
    beliefs, others = pooled_beliefs(state, context, each)
    assert others == {"b": ["a"]} and sorted(beliefs) == ["b", "c"] and beliefs["c"] == each["c"]
    assert beliefs["b"].load == pytest.approx(each["a"].load + each["b"].load)
    assert beliefs["b"].busy == pytest.approx(each["a"].busy + each["b"].busy)
    assert (beliefs["b"].usable_rows, beliefs["b"].fresh_rows) == (4000, 4000)
    assert beliefs["b"].length == pytest.approx(each["a"].length)
    state.learners["a"] = ("v0", 100, "full")
    assert pooled_beliefs(state, context, each)[1] == {"a": ["b"]}, "what the learner knows is kept"
    for apart in ({"class_versions": {"a": "v1"}}, {"assigned": ["a"]}, {"frozen": ["b"]}, {"pools": {"a": "a"}}):
        assert pooled_beliefs(state, msgspec.structs.replace(context, **apart), each) == (each, {})
    better = {**each, "b": msgspec.structs.replace(each["b"], length=each["b"].length + 3 * each["a"].length_se)}
    alike = {**each, "b": msgspec.structs.replace(each["b"], length=each["b"].length + each["a"].length_se)}
    assert pooled_beliefs(state, context, better) == (better, {}), "another kind of text"
    assert pooled_beliefs(state, context, alike)[1] == {"a": ["b"]}


def test_a_job_of_buckets_that_were_one_is_priced_for_all_of_them_and_its_version_is_what_it_gave_all():
    service = _Service()
    service.controller._config = PolicyConfig(policy="always", epoch_s=EPOCH_S, min_rows=500)
    service.controller.set_policy("always")
    rows = {"a": 3000, "b": 3000}
    service.context = msgspec.structs.replace(service.context, rows=rows, rows_written=rows, pools={"a": "a", "b": "a"})
    for _ in range(3):
        service.epoch(a=20, b=20)
    state, (order,) = service.controller._state, [d for d in service.controller.drain()[0] if d.action == "train"]
    assert sorted([order.bucket, *order.context["others"]]) == ["a", "b"] and order.context["arm"]["num_rows"] == 6000
    assert state.rows_at_job == rows, "nobody's rows are fresh now"
    score = ShadowScore(
        version="v1", acceptance_length=2.4, num_requests=40, num_tokens=4000, gain_mean=0.4, gain_lower=0.3
    )
    first = msgspec.structs.replace(score, version="v0", acceptance_length=2.0, gain_mean=0.0, gain_lower=0.0)
    result = TrainResult(
        job_id="j", status="accepted", version="v1", reason="", train_s=5.0, shadow_s=1.0, candidate=score, incumbent=first, num_rows=6000
    )  # fmt: skip
    service.controller.job_finished(result, decision_id=order.decision_id, now=service.clock.now())
    for bucket in ("a", "b"):
        assert state.owner_of(bucket, "v1") == order.decision_id and state.table.estimate(bucket, "v1") is not None
    other = order.context["others"][0]
    service.controller.order_ended(order.decision_id, "refused", other)
    assert state.owner_of(other, "v1") is None and state.owner_of(order.bucket, "v1") == order.decision_id
    assert state.actions[order.decision_id].outcome == "accepted"
    service.controller.order_ended(order.decision_id, "rolled_back", other)
    assert state.owner_of(order.bucket, "v1") is None and state.actions[order.decision_id].outcome == "rolled_back"


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_version_goes_to_no_other_kind_of_text_that_got_the_name_while_its_job_ran(has_ended):
    service = _Service()
    service.controller._config = PolicyConfig(policy="always", epoch_s=EPOCH_S, min_rows=500)
    service.controller.set_policy("always")
    service.context = msgspec.structs.replace(service.context, rows={"a": 3000}, rows_written={"a": 3000})
    service.controller.begin_bucket("a", service.clock.now(), 0)
    began = service.clock.now()
    for _ in range(3):
        service.epoch(a=20)
    (order,) = [d for d in service.controller.drain()[0] if d.action == "train"]
    assert order.context["text_began"] == began
    if has_ended:
        service.controller.begin_bucket("a", service.clock.now() + 1.0, 3000)
    result = TrainResult(
        job_id="j", status="accepted", version="v1", reason="", train_s=5.0, shadow_s=1.0, num_rows=3000
    )
    outcome = service.controller.job_finished(result, decision_id=order.decision_id, now=service.clock.now() + 2.0)
    assert outcome.publish == (None if has_ended else "v1") and ("has ended" in outcome.reason) == has_ended


def test_a_version_goes_to_no_other_kind_of_text_that_got_the_name_of_a_class_that_learned_with_its_own():
    service = _Service()
    service.controller._config = PolicyConfig(policy="always", epoch_s=EPOCH_S, min_rows=500)
    service.controller.set_policy("always")
    rows = {"a": 3000, "b": 3000, "c": 3000}
    pools = dict.fromkeys(rows, "a")
    service.context = msgspec.structs.replace(service.context, rows=rows, rows_written=rows, pools=pools)
    for _ in range(3):
        service.epoch(a=20, b=20, c=20)
    state, (order,) = service.controller._state, [d for d in service.controller.drain()[0] if d.action == "train"]
    first, (gone, stays) = order.bucket, order.context["others"]
    assert order.context["usable_rows"] == rows
    service.controller.begin_bucket(gone, service.clock.now() + 1.0, 3000)
    result = TrainResult(
        job_id="j", status="accepted", version="v1", reason="", train_s=5.0, shadow_s=1.0, num_rows=3000
    )
    outcome = service.controller.job_finished(result, decision_id=order.decision_id, now=service.clock.now() + 2.0)
    assert (outcome.publish, outcome.others) == ("v1", [stays])
    assert [b for b in rows if state.owner_of(b, "v1") is not None] == sorted([first, stays])


def test_a_bucket_that_was_a_part_of_another_keeps_whose_its_versions_are_and_what_they_learned():
    service = _Service()
    for _ in range(3):
        service.epoch(whole=20)
    state = service.controller._state
    state.owners["whole"], state.learned["v1"] = {"v1": 4}, {"whole": 5000, "other": 70}
    state.table.set_shadow("other", "v1", 1.1, 30)  # of a class that had this number before
    service.controller.part_bucket("part", "whole", service.clock.now(), 0)
    service.controller.part_bucket("other", "never seen", service.clock.now(), 0)
    assert state.owner_of("part", "v1") == 4 and state.learned["v1"]["part"] == 5000
    assert "other" not in state.table.scores and "other" not in state.learned["v1"]


@pytest.mark.parametrize("is_part", [False, True])
def test_of_a_name_that_another_kind_of_text_has_now_neither_rows_nor_manifests_count(is_part):
    service = _Service()
    state, scores = service.controller._state, {"a": {"v0": 2.0, "v1": 4.5}}

    def rows_and_length(num_rows: int) -> tuple[int, tuple[float, float] | None]:
        rows = {"a": num_rows}
        service.context = HostContext(
            live_version="v0", first_version="v0", rows=rows, rows_written=rows, versions=["v0", "v1"], shadow=scores,
            learned_rows={"v1": rows},
        )  # fmt: skip
        service.epoch(a=20, whole=20)
        belief = bucket_beliefs(state, PolicyConfig(), service.context)["a"]
        return belief.usable_rows, state.table.estimate("a", "v1")

    usable, length = rows_and_length(4000)
    assert usable == 4000 and length is not None
    if is_part:
        service.controller.part_bucket("a", "whole", service.clock.now(), 4000)
    else:
        service.controller.begin_bucket("a", service.clock.now(), 4000)
    assert rows_and_length(4000) == (0, None)
    assert rows_and_length(4500) == (500, None)


def test_a_part_is_believed_to_be_what_it_is_and_not_what_its_whole_was():
    service = _Service()
    for _ in range(3):
        service.epoch(whole=20)
    table = service.controller._state.table
    table.set_shadow("whole", "v0", 2.0, 30)
    service.controller.part_bucket("part", "whole", service.clock.now(), 0)
    assert table.estimate("whole", "v0")[0] == pytest.approx(2.0) and table.estimate("part", "v0") is None
    service.epoch(part=2, num_rounds=36)
    assert table.estimate("whole", "v0")[0] == pytest.approx(2.0)
    assert table.estimate("part", "v0")[0] == pytest.approx(40 / 36)


class _Adapted(_Service):
    """A class with a version of its own beside a hold-back."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[LedgerEntry] = []

    def two_groups(
        self, adaptive_s: float, static_s: float, *, length: float = 2.0, slow: float = 0.0, asked: int = 0
    ) -> None:
        """An epoch of 20 and 8 requests at so many seconds a token, and `asked` times as many that asked for their group; a job
        beside half of it makes them slower."""
        self.seq += 1
        factor, rng = 1 + slow / 2, np.random.default_rng(self.seq)
        cells, rounds = [], []
        for group, version, token_s, num in (("adaptive", "v1", adaptive_s, 20), ("static", "v0", static_s, 8)):
            num_rounds = round(TOKENS / length)
            seconds = [factor * token_s * TOKENS * (1 + 0.05 * z) for z in rng.standard_normal(num)]
            cells.append(CellSums(
                bucket="a", group=group, version=version,
                sizes={1: SizeSums(
                    num_rounds=num_rounds * num, drafted_rounds=num_rounds * num, drafted_s=sum(seconds), num_tokens=TOKENS * num
                )},
                requests={
                    f"{self.seq}.{group}.{i}": RequestSums(s, TOKENS, num_rounds, TOKENS) for i, s in enumerate(seconds)
                },
            ))  # fmt: skip
            for is_training in (False, True) if slow else (False,):
                rounds.append(RoundMean(
                    batch_size=1, is_drafted=True, is_training=is_training, num_rounds=num_rounds * num // (2 if slow else 1),
                    mean_s=token_s * length * (1 + slow * is_training),
                ))  # fmt: skip
        rounds += [
            msgspec.structs.replace(r, batch_size=2, num_rounds=asked * r.num_rounds)
            for r in rounds[: len(rounds) // 2]
            if asked
        ]
        self.controller.observe(FeedbackSums(cells=cells, rounds=rounds))
        self.close()

    def close(self) -> None:
        self.clock.advance(EPOCH_S)
        self.controller.tick(self.clock.now(), self.context)
        self.entries += self.controller.drain()[1]

    def booked(self, kind: str) -> float:
        return sum(e.seconds for e in self.entries if e.kind == kind)


def test_a_job_beside_serving_costs_interference_and_makes_no_saving():
    saved = []
    for slow in (0.0, 1.0):
        service = _Adapted()
        for number in range(12):
            service.two_groups(0.004, 0.006, slow=slow if number > 3 else 0.0)
        saved.append(service.booked("saving"))
        assert (service.booked("interference") > 0) == (slow > 0)
    assert saved[1] == pytest.approx(saved[0], rel=0.01) == pytest.approx(12 * 20 * TOKENS * 0.002, rel=0.1)


def test_rounds_that_no_comparison_takes_dilute_a_slow_down_and_hide_none():
    """Requests that ask for a group are in no cell that decides, and in all rounds."""
    saved = []
    for asked in (0, 9):
        service = _Adapted()
        for number in range(12):
            service.two_groups(0.004, 0.006, slow=1.0 if number > 3 else 0.0, asked=asked)
        saved.append(service.booked("saving"))
    assert saved[1] == pytest.approx(saved[0], rel=0.02)


def test_what_the_comparison_lacks_is_booked_where_a_class_ends():
    """The hold-back's time grows, which the latest minutes of it value too low: the end of its class books the rest."""
    service = _Adapted()
    for number in range(10):
        service.two_groups(0.004, 0.005 + 0.001 * number)
    service.controller.forget_bucket("a")
    service.close()
    ends = [e for e in service.entries if e.entry_id.endswith(":gone")]
    assert [(e.kind, e.bucket, e.version) for e in ends] == [("saving", "a", "v1")] and ends[0].seconds > 0
    true_s = sum(20 * TOKENS * (0.001 + 0.001 * number) for number in range(10))
    assert abs(service.booked("saving") - true_s) < abs(service.booked("saving") - ends[0].seconds - true_s)
    assert service.controller.check(service.entries) == []


def test_what_the_comparison_lacks_is_booked_where_the_text_changes_and_the_books_add_up():
    service = _Adapted()
    for phase in range(8):
        for _ in range(12):
            service.two_groups(*((0.004, 0.005), (0.009, 0.008))[phase % 2], length=(3.0, 1.5)[phase % 2])
    ends = [e for e in service.entries if e.entry_id.endswith(":end")]
    assert ends and all((e.kind, e.bucket, e.version) == ("saving", "a", "v1") for e in ends)
    assert len({e.entry_id for e in service.entries}) == len(service.entries)
    assert service.booked("saving") == pytest.approx(0.0, abs=0.05 * 96 * 20 * TOKENS * 0.001)
    assert service.controller.check(service.entries) == []
