"""Claims of bandit/beliefs/classes.py: kinds of vectors become classes whatever their order, and keep their numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.bandit.beliefs.classes import IDLE_S, MAX_CLUMPS, MAX_RATE, MIN_WEIGHT, SPACE_IDLE_S, ClassBook
from paceline.contracts import CLASS_PREFIX, TrafficClasses, class_name

DIMS = 16
SPREAD = 0.15
"""Of one kind of prompts, as the bundled target's are."""


def centres(num: int, seed: int = 0) -> np.ndarray:
    """(num, DIMS) points about 0.4 apart, as kinds of prompts are."""
    return 0.28 * np.random.default_rng(seed).standard_normal((num, DIMS)) / np.sqrt(DIMS) * np.sqrt(2)


def prompts(centre: np.ndarray, num: int, seed: int, spread: float = SPREAD) -> np.ndarray:
    """(num, DIMS) float32 around a centre, in six directions as real ones are."""
    noise = np.zeros((num, DIMS))
    noise[:, :6] = np.random.default_rng(seed).standard_normal((num, 6)) * spread / np.sqrt(6)
    return (centre + noise).astype("<f4")


def learn(
    book: ClassBook, vectors: np.ndarray, *, at: float = 0.0, max_classes: int = 16, every: int = 20, tenant: str = "",
    kept: Collection[str] = (),
) -> ClassBook:  # fmt: skip
    """Show the book vectors of a tenant one after the other, ten a second."""
    for i, vector in enumerate(vectors):
        book.observe("s", vector.tobytes(), DIMS, at + i / 10, [tenant])
        if i % every == every - 1:
            book.tidy(max_classes, at + i / 10, kept)
    book.tidy(max_classes, at + len(vectors) / 10, kept)
    return book


def class_of(classes: TrafficClasses, vector: np.ndarray) -> str:
    """As replicas tell it."""
    away = np.linalg.norm(np.array(classes.centroids) - vector, axis=1)
    best = int(away.argmin())
    return classes.names[best] if away[best] <= classes.radii[best] else ""


def mixed(kinds: list[np.ndarray], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(np.concatenate(kinds))


def majority(classes: TrafficClasses, vectors: np.ndarray) -> tuple[str, float]:
    """The class of most of these vectors, and their share."""
    (name, count), *_ = Counter(class_of(classes, v) for v in vectors).most_common(1)
    return name, count / len(vectors)


@settings(max_examples=12)
@given(seed=st.integers(0, 10_000), num=st.integers(2, 5))
def test_every_kind_gets_a_class_of_its_own_whatever_the_order(seed, num):
    kinds = [prompts(c, 80, i) for i, c in enumerate(centres(num, seed=3))]
    classes = learn(ClassBook(), mixed(kinds, seed)).published
    fresh = [Counter(class_of(classes, v) for v in prompts(c, 100, 90 + i)) for i, c in enumerate(centres(num, seed=3))]
    assert len({found.most_common(1)[0][0] for found in fresh}) == num
    mostly = sum(max(found[name] for found in fresh) for name in classes.names)
    assert mostly > 93 * num, "a class holds one kind"
    assert len(classes.names) <= num + 2
    assert all(name.startswith(CLASS_PREFIX) for name in classes.names)


def test_kinds_that_come_one_after_the_other_become_the_same_classes_as_mixed_ones():
    kinds = [prompts(c, 80, i) for i, c in enumerate(centres(4))]
    book = learn(ClassBook(), np.concatenate(kinds))
    assert len({majority(book.published, k)[0] for k in kinds}) == 4


def test_numbers_stay_while_more_of_the_same_and_new_kinds_come():
    places = centres(5)
    book = learn(ClassBook(), mixed([prompts(c, 60, i) for i, c in enumerate(places[:3])], 1))
    before = [majority(book.published, prompts(c, 50, 70 + i))[0] for i, c in enumerate(places[:3])]
    for turn in range(6):
        more = mixed([prompts(c, 60, 100 * turn + i) for i, c in enumerate(places[: 3 + (turn > 2) * 2])], turn)
        learn(book, more, at=100.0 * (turn + 1))
    after = [majority(book.published, prompts(c, 50, 70 + i))[0] for i, c in enumerate(places)]
    assert after[:3] == before and len(set(after)) == 5


def test_what_is_published_settles():
    kinds = [prompts(c, 400, i) for i, c in enumerate(centres(4))]
    book = learn(ClassBook(), mixed(kinds, 0)[:800])
    names, rev = book.published.names, book.published.rev
    learn(book, mixed(kinds, 1)[800:], at=200.0)
    assert book.published.names == names and book.published.rev <= rev + 4


@pytest.mark.parametrize("seed", range(4))
def test_kinds_of_different_widths_become_classes_beside_many_others(seed):
    """A real model's kinds differ threefold in width; two narrow ones lie within a width of the wide ones of one another."""
    rng = np.random.default_rng(seed)
    spreads = [0.16, 0.15, 0.14, 0.11, 0.09, 0.09, 0.06, 0.05]
    places = 0.28 * rng.standard_normal((8, 48)) / np.sqrt(48)
    places[7] = places[6] + 0.12 * (step := rng.standard_normal(48)) / np.linalg.norm(step)
    kinds = [p + rng.standard_normal((320, 48)) * s / np.sqrt(48) for p, s in zip(places, spreads, strict=True)]
    book, told = ClassBook(), {k: Counter() for k in range(8)}
    for i in range(320):
        for at, k in enumerate(rng.permutation(8)):
            vector = kinds[k][i].astype("<f4")
            if i >= 240:
                told[k][class_of(book.published, vector)] += 1
            book.observe("s", vector.tobytes(), 48, i + at / 8)
        if i % 4 == 3:
            book.tidy(16, i)
    mains = {k: counts.most_common(1)[0] for k, counts in told.items()}
    assert len({name for name, _ in mains.values()}) == 8 and "" not in dict(mains.values()), mains
    assert all(count >= 0.8 * 80 for _, count in mains.values()) and len(book.published.names) <= 10, mains


def test_the_number_stays_with_what_came_first_where_another_kind_comes_within_reach():
    centre = centres(1)[0]
    book = learn(ClassBook(), np.concatenate([prompts(centre, 80, 1), prompts(centre + 1.0, 400, 2)]))
    (own, _), (other, _) = (majority(book.published, prompts(c, 60, 3)) for c in (centre, centre + 1.0))
    beside = centre + 0.25 * np.eye(DIMS)[7]  # within the reach of the smaller class
    assert class_of(book.published, beside) == own != other
    learn(book, prompts(beside, 300, 4, 0.06), at=200.0)
    assert majority(book.published, prompts(centre, 60, 5))[0] == own
    assert majority(book.published, prompts(beside, 60, 6, 0.06))[0] not in (own, other, "")


def test_a_night_without_traffic_leaves_classes_as_they_are():
    a, b = centres(2)
    book = learn(ClassBook(), mixed([prompts(a, 40, 0), prompts(b, 40, 1)], 0))
    names = [majority(book.published, prompts(place, 60, 9))[0] for place in (a, b)]
    learn(book, prompts(a, 30, 2), at=50_000.0)
    assert [majority(book.published, prompts(place, 60, 9))[0] for place in (a, b)] == names


def test_hours_of_another_kind_take_a_class_from_what_resembles_another_only():
    """Where it has a version of its own, not even from that."""
    far, beside, busy = centres(1)[0] + 1.0, 0.24 * np.eye(DIMS)[7], np.zeros(DIMS)
    start = mixed([prompts(busy, 60, 0), prompts(far, 40, 1), prompts(beside, 40, 2, 0.06)], 0)
    for is_kept in (False, True):
        book = learn(ClassBook(), start)
        names = [majority(book.published, prompts(place, 60, 9, 0.06))[0] for place in (busy, far, beside)]
        assert len({*names, ""}) == 4
        for turn in range(240):
            learn(book, prompts(busy, 20, 100 + turn), at=50.0 + 30 * turn, kept=[names[2]] if is_kept else [])
        now = [majority(book.published, prompts(place, 60, 9, 0.06))[0] for place in (busy, far, beside)]
        assert now == (names if is_kept else [*names[:2], names[0]])


def test_a_flood_of_one_tenant_makes_the_kinds_of_another_no_rarer():
    places = [0.8 * np.eye(DIMS)[k] for k in range(3)] + [0.8 * np.eye(DIMS)[2] + 0.24 * np.eye(DIMS)[9]]
    book = ClassBook()
    for turn in range(60):
        flood = prompts(places[turn % 2], 98, turn)
        book.observe("s", flood.tobytes(), DIMS, 100.0 * turn, ["acme"] * 98)
        own = np.concatenate([prompts(places[2], 1, 500 + turn), prompts(places[3], 1, 900 + turn, 0.06)])
        book.observe("s", own.tobytes(), DIMS, 100.0 * turn + 50, ["bolt"] * 2)
        book.tidy(16, 100.0 * turn + 60)
    names = [majority(book.published, prompts(place, 60, 9, 0.06))[0] for place in places]
    assert len({*names, ""}) == 5, names


def test_a_book_of_before_counts_were_kept_is_read():
    book = learn(ClassBook(), mixed([prompts(c, 60, i) for i, c in enumerate(centres(3))], 5))
    values = msgspec.to_builtins(book)
    del values["counts"]
    old = msgspec.convert(values, ClassBook)
    before = old.published.names
    learn(old, mixed([prompts(c, 20, 9 + i) for i, c in enumerate(centres(3))], 6), at=100.0)
    assert old.published.names == before and len(old.counts) == len(old.labels)


def test_a_restart_changes_nothing():
    vectors = mixed([prompts(c, 60, i) for i, c in enumerate(centres(4))], 5)
    whole = learn(ClassBook(), vectors, tenant="a")
    book = ClassBook()
    for i in range(0, len(vectors), 20):
        book = learn(book, vectors[i : i + 20], at=i / 10, tenant="a")
        book = msgspec.msgpack.decode(msgspec.msgpack.encode(book), type=ClassBook)
    assert book.published.names == whole.published.names
    assert np.allclose(book.published.centroids, whole.published.centroids, atol=1e-4)


def test_replicas_with_different_traffic_agree_on_one_set_of_classes():
    """Each batch comes from one replica; kinds that only one of them serves are classes for both."""
    kinds = [prompts(c, 80, i) for i, c in enumerate(centres(3))]
    book, at = ClassBook(), 0.0
    for i in range(80):
        for replica in (kinds[0][i : i + 1], np.stack([kinds[1][i], kinds[2][i]])):
            book.observe("s", replica.tobytes(), DIMS, at)
            at += 0.1
        book.tidy(16, at)
    assert len({majority(book.published, k)[0] for k in kinds}) == 3


def test_two_classes_that_grow_into_one_another_are_joined():
    a, b = centres(2)
    book = learn(ClassBook(), mixed([prompts(a, 60, 0), prompts(b, 60, 1)], 0))
    assert majority(book.published, prompts(a, 60, 9))[0] != majority(book.published, prompts(b, 60, 9))[0]
    for turn in range(8):  # b's text becomes a's
        place = b + (a - b) * (turn + 1) / 8
        learn(book, mixed([prompts(a, 60, 2 + turn), prompts(place, 120, 50 + turn)], turn), at=100.0 * (turn + 1))
    names = {majority(book.published, prompts(a, 60, s))[0] for s in range(90, 94)}
    names |= {majority(book.published, prompts(a, 60, s))[0] for s in range(50, 58)}
    assert len(names) == 1


def test_a_class_that_falls_into_two_says_which_one_the_new_one_was_a_part_of():
    book, centre = ClassBook(), centres(1)[0]
    learn(book, prompts(centre, 60, 1))
    assert book.published.names == ["~class-1"] and book.take_parted() == []
    beside = centre + 0.25 * np.eye(DIMS)[7]  # within the reach of the class
    learn(book, prompts(beside, 60, 2), at=100.0)
    assert book.published.names == ["~class-1", "~class-2"]
    restored = msgspec.msgpack.decode(msgspec.msgpack.encode(book), type=ClassBook)
    assert restored.take_parted() == [("~class-2", "~class-1")] and restored.take_parted() == []
    assert restored.pools() == {"~class-1": "~class-1", "~class-2": "~class-1"}
    far = centre + np.eye(DIMS)[8]
    learn(restored, prompts(far, 60, 3), at=200.0)
    assert len(restored.published.names) == 3 and restored.take_parted() == [], "it was a part of none"
    assert sorted(restored.pools()) == ["~class-1", "~class-2"]
    learn(restored, prompts(far, 60, 4), at=300.0, max_classes=2)
    assert restored.published.names == ["~class-2", "~class-3"] and restored.pools() == {}, "one alone is no pool"


def test_the_number_of_classes_and_of_stored_sums_is_bounded_whatever_comes():
    places = centres(40, seed=9) * 3
    book = learn(ClassBook(), mixed([prompts(c, 30, i, 0.05) for i, c in enumerate(places)], 2), max_classes=6)
    assert len(book.published.names) <= 6 and set(book.published.names) <= {f"~class-{i}" for i in range(1, 7)}
    assert len(book.labels) <= MAX_CLUMPS
    assert len(msgspec.msgpack.encode(book)) < MAX_CLUMPS * (4 * DIMS + 40) + 20_000


def test_a_flood_of_odd_prompts_drives_out_no_busy_class():
    kinds = [prompts(c, 60, i) for i, c in enumerate(centres(4))]
    book = learn(ClassBook(), mixed(kinds, 0), max_classes=5)
    before = [majority(book.published, k)[0] for k in kinds]
    rng = np.random.default_rng(1)
    for i in range(600):
        odd = (rng.standard_normal(DIMS) / np.sqrt(DIMS)).astype("<f4")
        own = kinds[i % 4][i % 60]
        book.observe("s", odd.tobytes() + own.tobytes(), DIMS, 100 + i / 10)
        if i % 20 == 19:
            book.tidy(5, 100 + i / 10)
    after = [majority(book.published, k) for k in kinds]
    assert [name for name, _ in after] == before and all(share > 0.8 for _, share in after)


def test_an_idle_class_gives_its_number_only_to_a_kind_that_finds_no_other():
    places = centres(4)
    book = learn(ClassBook(), mixed([prompts(c, 60, i) for i, c in enumerate(places[:3])], 0), max_classes=3)
    gone = majority(book.published, prompts(places[0], 40, 9))[0]
    busy = {majority(book.published, prompts(c, 40, 9))[0] for c in places[1:3]}
    late = mixed([prompts(c, 60, 40 + i) for i, c in enumerate(places[1:])], 3)
    learn(book, late, at=IDLE_S / 2, max_classes=3)
    assert majority(book.published, prompts(places[0], 40, 9))[0] == gone, "not idle for long enough"
    assert gone not in book.take_ended()
    learn(book, late, at=2.5 * IDLE_S, max_classes=3)
    assert majority(book.published, prompts(places[3], 40, 9))[0] == gone
    assert {majority(book.published, prompts(c, 40, 9))[0] for c in places[1:3]} == busy
    ended = set(book.take_ended())
    assert gone in ended and not ended & busy and book.take_ended() == [], "the name means another kind now"


def test_equal_prompts_are_one_class_and_few_ones_none():
    same = np.repeat(prompts(centres(1)[0], 1, 0), 50, axis=0)
    assert len(learn(ClassBook(), same).published.names) == 1
    assert learn(ClassBook(), same[: int(MIN_WEIGHT) - 1]).published.names == []


def test_broken_vectors_and_floods_of_vectors_are_left_out():
    book = ClassBook()
    good = prompts(centres(1)[0], 300, 0)
    bad = np.full((3, DIMS), [[np.nan], [np.inf], [1e30]], dtype="<f4")
    book.observe("s", bad.tobytes(), DIMS, 0.0)
    book.observe("s", good[:1].tobytes()[:-1], DIMS, 0.0)
    book.observe("s", b"", 0, 0.0)
    assert book.num_vectors == 0 and not book.tidy(16, 0.0)
    book.observe("s", good.tobytes(), DIMS, 5.5)
    assert book.num_vectors == MAX_RATE
    book.observe("s", good[:, :4].tobytes(), 4, 7.0)
    assert book.num_vectors == MAX_RATE, "vectors of another length are not of this space"


def test_vectors_of_another_target_replace_the_old_ones_once_those_stopped():
    book = learn(ClassBook(), prompts(centres(1)[0], 40, 0))
    assert "~class-1" in book.published.names and "~class-1" not in book.take_ended()
    other = prompts(centres(1, seed=7)[0], 40, 1)
    book.observe("t", other[0].tobytes(), DIMS, 5.0)
    assert book.space == "s"
    for i, vector in enumerate(other):
        book.observe("t", vector.tobytes(), DIMS, 5.0 + SPACE_IDLE_S + i)
    assert book.tidy(16, 200.0) and book.space == book.published.space == "t"
    assert "~class-1" in book.take_ended()


def test_shares_are_those_of_the_latest_traffic():
    a, b = centres(2)
    book = learn(ClassBook(), mixed([prompts(a, 100, 0), prompts(b, 100, 1)], 0))
    learn(book, np.concatenate([prompts(a, 100, 2)] * 3), at=4000.0)
    name = majority(book.published, prompts(a, 50, 3))[0]
    shares = book.shares_of_classes()
    assert sum(shares.values()) == pytest.approx(1.0) and shares[name] > 0.9


def test_a_class_that_begins_counts_once():
    a, b = centres(2)
    book = learn(ClassBook(), mixed([prompts(a, 100, 0), prompts(b, 100, 1)], 0))
    shares = book.shares_of_classes()
    assert len(shares) == 3 and shares[""] < 0.15, "those that came before there was a class are of one now"


def test_a_part_that_ends_at_once_was_a_part_of_nothing():
    book = learn(ClassBook(), mixed([prompts(c, 60, i) for i, c in enumerate(centres(3))], 0))
    book.take_parted()
    book.parted = [(k, 1) for k in (2, 3)]
    assert book.tidy(2, 100.0)
    gone = set(book.take_ended())
    assert gone and not gone & {new for new, _ in book.take_parted()}


def test_fewer_classes_may_be_asked_for_at_any_time():
    book = learn(ClassBook(), mixed([prompts(c, 60, i) for i, c in enumerate(centres(4))], 0))
    assert len(book.published.names) >= 4
    names = set(book.published.names)
    assert book.tidy(2, 100.0) and len(book.published.names) <= 2
    assert set(book.take_ended()) >= names - set(book.published.names)
    assert book.tidy(0, 100.0) and book.published.names == []


def test_a_class_whose_number_is_beyond_a_lowered_limit_gives_way_once_it_is_idle():
    """Its number goes to nobody, and it is left without clumps while the others are sorted."""
    places = centres(2)
    book = learn(ClassBook(), mixed([prompts(c, 60, i) for i, c in enumerate(places)], 0))
    low, high = sorted(range(2), key=lambda i: majority(book.published, prompts(places[i], 40, 9))[0])
    learn(book, prompts(places[high], 100, 20), at=100.0)
    assert book.tidy(1, 200.0) and book.published.names == ["~class-2"]
    learn(book, prompts(places[low], 60, 30), at=200.0 + 2 * IDLE_S, max_classes=1)
    assert majority(book.published, prompts(places[low], 40, 31))[0] == "~class-1"


def holders(book: ClassBook, tenant: str) -> dict[str, float]:
    """Class -> the tenant's share of it."""
    weights, own = Counter[int](), Counter[int]()
    for label, weight, tenants in zip(book.labels, book.weights, book.tenants, strict=True):
        weights[label] += weight
        own[label] += tenants.get(tenant, 0.0)
    return {class_name(label): own[label] / weight for label, weight in weights.items() if label}


def held(book: ClassBook) -> Counter[str]:
    """Tenant -> classes, one of several tenants by its shares."""
    names = {name for tenants in book.tenants for name in tenants}
    return Counter({name: sum(holders(book, name).values()) for name in names})


def test_a_tenant_that_has_every_class_gives_others_their_even_part_and_takes_none_back():
    places = centres(16, seed=9) * 3
    flood = [prompts(c, 60, i, 0.05) for i, c in enumerate(places[:10])]
    book = learn(ClassBook(), mixed(flood, 0), max_classes=6, tenant="acme")
    assert held(book)["acme"] == pytest.approx(6, abs=0.01), "free places are anybody's"
    mine = [prompts(c, 60, 50 + i, 0.05) for i, c in enumerate(places[10:])]
    learn(book, mixed(mine, 1), at=200.0, max_classes=6, tenant="bolt")
    assert abs(held(book)["acme"] - held(book)["bolt"]) < 1.5 and len(book.take_ended()) <= 3
    named = {name for name, share in holders(book, "bolt").items() if share > 0.8}
    assert len(named) == 3 and named <= {majority(book.published, k)[0] for k in mine}
    for turn in range(3):
        learn(book, mixed(flood, 2 + turn), at=400.0 + 100 * turn, max_classes=6, tenant="acme")
    assert not named & set(book.take_ended()), "whoever is within its part gives nothing up"


def test_a_kept_class_gives_way_to_no_other_tenant_however_idle_and_however_many_its_owner_has():
    places = centres(6, seed=9) * 3
    kinds = np.concatenate([prompts(c, 60, i, 0.05) for i, c in enumerate(places[:3])])
    book = learn(ClassBook(), kinds, max_classes=3, tenant="acme")
    trained = majority(book.published, prompts(places[0], 40, 9, 0.05))[0]
    assert trained and len(book.published.names) == 3
    others = mixed([prompts(c, 60, 20 + i, 0.05) for i, c in enumerate(places[3:])], 1)
    learn(book, others, at=2 * IDLE_S, max_classes=3, tenant="bolt", kept={trained})
    assert trained not in book.take_ended()
    assert majority(book.published, prompts(places[0], 40, 9, 0.05))[0] == trained
    assert held(book)["bolt"] == pytest.approx(2, abs=0.01), "the idle ones that nothing was trained for went"
    bridge = np.linspace(places[0], places[3], 60).astype("<f4")  # prompts between the two
    learn(book, bridge, at=2 * IDLE_S + 100, max_classes=3, tenant="bolt", kept={trained})
    assert trained not in book.take_ended()


def test_a_class_gives_way_to_no_part_of_itself_however_idle():
    kinds = [prompts(c, 60, seed=i) for i, c in enumerate(centres(2))]
    book = learn(ClassBook(), mixed(kinds, 0), max_classes=2)
    assert len(book.published.names) == 2
    book.labels, book.seen, book.is_untidy = (
        [1] * len(book.labels),
        {1: 0.0},
        True,
    )  # as while other traffic made kinds coarser
    weight = sum(book.weights)
    book.tidy(1, 2 * IDLE_S)
    assert book.published.names == [f"{CLASS_PREFIX}class-1"] and sum(book.weights) == weight
    assert (book.take_ended(), book.take_parted(), book.pools()) == ([], [], {})
