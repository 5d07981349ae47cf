"""Names of buckets are bounded, and one tenant's junk takes no place from another."""

import random

from paceline.names import is_class, is_label, tenant_of
from paceline.serving.engine.buckets import DEFAULT_BUCKET, OTHER_BUCKET, BucketNames


def test_junk_of_one_tenant_fills_what_is_free_and_gives_everybody_else_an_even_part():
    names = BucketNames(64)
    assert names.resolve("finance", "bolt") == "finance"
    found = {names.resolve(f"junk-{i}", "acme") for i in range(1000)}
    assert len(found - {OTHER_BUCKET}) == 62 and names.num_capped == 1000 - 62, "what is free is anybody's"
    assert names.resolve("finance", "bolt") == "finance"
    for tenant in ("bolt", "core", "dune"):
        for i in range(15):
            assert names.resolve(f"{tenant}-{i}", tenant) == f"{tenant}-{i}"
            names.resolve(f"more-{tenant}-{i}", "acme")
    assert [names.counts[t] for t in ("acme", "bolt", "core", "dune")] == [17, 16, 15, 15]
    assert names.resolve("finance", "bolt") == "finance", "nobody within its part gives way"


def test_nobodys_names_may_fill_all_and_give_way_to_tenants_the_least_recent_first():
    names = BucketNames(10)
    assert [names.resolve(f"n{i}") for i in range(12)] == [f"n{i}" for i in range(9)] + [OTHER_BUCKET] * 3
    assert names.resolve("n0") == "n0"
    assert names.resolve("finance", "bolt") == "finance" and names.resolve("n0") == "n0"
    assert names.resolve("n1") == OTHER_BUCKET, "its place is gone"
    assert len(names) == 10 and names.resolve(None) == DEFAULT_BUCKET


def test_names_with_a_version_of_their_own_give_way_to_nobody_and_need_no_place():
    names, kept = BucketNames(5), {"n0", "n1", "trained"}
    for i in range(4):
        assert names.resolve(f"n{i}", "acme") == f"n{i}"
    assert [names.resolve(f"b{i}", "bolt", kept) for i in range(3)] == ["b0", "b1", OTHER_BUCKET]
    assert [names.resolve(f"n{i}", "acme", kept) for i in range(4)] == ["n0", "n1", OTHER_BUCKET, OTHER_BUCKET]
    assert names.resolve("trained", "acme", kept) == "trained" and len(names) == 5


def test_every_tenant_gets_one_place_before_anybody_keeps_two_more():
    names, rng = BucketNames(33), random.Random(0)
    tenants = [f"t{i}" for i in range(30)]
    sent = [(t, f"{t}-{i}") for t in tenants for i in range(20)]
    rng.shuffle(sent)
    num_changes, before = 0, set()
    for _ in range(20):
        for tenant, name in sent:
            names.resolve(name, tenant)
            now = set(names.owners)
            num_changes += bool(before - now)
            before = now
    counts = [names.counts.get(t, 0) for t in tenants]
    assert min(counts) >= 1 and max(counts) - min(counts) <= 1 and len(names) == 33
    assert num_changes <= 33**2 / 2, "places change hands only so often: every name costs memory for good"


def test_a_tenant_that_comes_back_to_its_names_finds_them():
    names = BucketNames(64)
    mine = [names.resolve(f"m{i}", "me") for i in range(8)]
    for k in range(40):
        for i in range(20):
            names.resolve(f"x{k}-{i}", f"tenant-{k}")
        assert names.resolve(mine[0], "me") == mine[0], "what is in use stays"


def test_buckets_of_tenants_own_are_never_anothers_and_take_places_like_others():
    names = BucketNames(5)
    assert names.resolve("code", "acme", is_own=True) == "code@acme"
    assert names.resolve("code", "bolt", is_own=True) == "code@bolt"
    assert names.resolve(None, "acme", is_own=True) == "default@acme"
    assert names.resolve("code", "corp") == "code" and names.resolve(None, "corp") == DEFAULT_BUCKET
    assert [tenant_of(b) for b in names.owners] == ["acme", "bolt", "acme", ""]
    assert all(names.owner(b) == tenant_of(b) for b in list(names.owners)[:3]) and len(names) == 5
    assert names.resolve("law", "acme", is_own=True) == OTHER_BUCKET, "nobody owes it a place"
    for client in ("code@bolt", "default@acme"):
        assert is_class(client) and not is_label(client), "an operator may name it, a client cannot"
    assert is_class("code@~ci") and not any(map(is_class, ("code@", "@acme", "a@b@c", "code@ x")))


def test_what_a_tenant_may_not_name_is_in_nobodys_bucket():
    names = BucketNames(5)
    assert names.resolve(OTHER_BUCKET, "acme", is_own=True) == OTHER_BUCKET and len(names) == 1
    assert names.resolve("chat", "acme", is_own=True) == "chat@acme"
