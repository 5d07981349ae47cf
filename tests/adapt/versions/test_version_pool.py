"""The pool gives up what is worth least, and never what somebody refers to."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from paceline.adapt.versions.pool import best_versions, choose_evictions
from paceline.contracts import DrafterManifest


def manifest(version: str, created: float = 0.0, num_bytes: int = 10) -> DrafterManifest:
    return DrafterManifest(
        version=version, sha256="0" * 64, num_bytes=num_bytes, drafter_type="specblock", config={}, shapes_hash="",
        target_version="t", parent=None, arm="full", bucket="math", num_train_rows=0, metrics={}, created=created,
    )  # fmt: skip


def evict(manifests, max_bytes, **options) -> list[str]:
    given = {"kept": (), "best": (), "worthless": (), "last_used": {}, **options}
    return choose_evictions(manifests, max_bytes=max_bytes, **given)


ALL = [manifest(v, created=float(i)) for i, v in enumerate("abcde")]


def test_nothing_goes_below_the_limit():
    assert evict(ALL, 50) == []


def test_least_recently_used_goes_first():
    assert evict(ALL, 30) == ["a", "b"]
    assert evict(ALL, 30, last_used={"a": 100.0}) == ["b", "c"]


def test_versions_at_an_end_go_before_older_ones_and_the_best_of_a_bucket_last():
    assert evict(ALL, 30, worthless={"e"}) == ["e", "a"]
    assert evict(ALL, 0, best={"a"}, worthless={"d"}) == ["d", "b", "c", "e", "a"]


def test_what_is_referred_to_stays_even_beyond_the_limit():
    assert evict(ALL, 0, kept={"a", "c"}) == ["b", "d", "e"]


def test_the_longest_acceptance_length_is_the_best_of_its_bucket():
    assert best_versions({"math": {"a": 2.0, "b": 3.0}, "code": {"a": 4.0}, "none": {}}) == {"a", "b"}


@given(
    st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(1, 50), max_size=12),
    st.integers(0, 300),
    st.data(),
)
def test_the_rest_fits_or_only_what_is_kept_is_left(sizes, max_bytes, data):
    manifests = [msgspec.structs.replace(manifest(v), num_bytes=n) for v, n in sizes.items()]
    kept = set(data.draw(st.lists(st.sampled_from(sorted(sizes)), max_size=4))) if sizes else set()
    gone = evict(manifests, max_bytes, kept=kept)
    rest = {m.version: m.num_bytes for m in manifests if m.version not in gone}
    assert not kept & set(gone) and len(gone) == len(set(gone))
    assert sum(rest.values()) <= max_bytes or set(rest) <= kept
    if gone:  # not one more than needed
        assert sum(rest.values()) + sizes[gone[-1]] > max_bytes
