"""Over a real socket: what one tenant's token opens is its own, whatever the client writes into headers and fields."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest

from paceline.config import ClientLimits, EngineConfig
from paceline.contracts import Group
from paceline.serving.api.app import build_api
from paceline.serving.api.generation import ApiParts, default_group
from paceline.serving.wire.accounts import Account, Allowance, Clients
from paceline.serving.wire.credentials import Tokens
from tests.helpers.api_server import TOKENIZER, ScriptedEngine, serve_app, serve_engine, wait_until
from tests.helpers.fakes import tiny_target

FILE = """
tokens:
  - {token: a, tenant: acme}
  - {token: a2, tenant: acme}
  - {token: b, tenant: bolt}
  - {token: c, tenant: corp}
  - {token: own1}
  - {token: own2}
  - {token: ops, role: admin}
tenants:
  acme: {max_unfinished: 3, max_body_bytes: 4000, buckets: [chat]}
  corp: {shares_training: true}
"""
SECRET = list(range(5, 70))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    path = tmp_path_factory.mktemp("tokens") / "tokens.yaml"
    path.write_text(FILE)
    return Tokens(api_token="front", file=path)


@pytest.fixture(scope="module")
def real(tokens: Tokens) -> Iterator[SimpleNamespace]:
    config = EngineConfig(max_running=8, kv_bytes=4 * 2**20)
    with serve_engine(tiny_target(vocab=300, layers=2), config, clients=Clients(tokens)) as (url, engine):
        yield SimpleNamespace(url=url, engine=engine)


@pytest.fixture
def scripted(tokens: Tokens) -> Iterator[SimpleNamespace]:
    engine = ScriptedEngine()
    with serve_app(build_api(ApiParts(client=engine, tokenizer=TOKENIZER, clients=Clients(tokens)))) as url:
        yield SimpleNamespace(url=url, engine=engine)


def ask(url: str, token: str = "", headers: dict[str, str] | None = None, **body) -> httpx.Response:
    sent = {**({"authorization": f"Bearer {token}"} if token else {}), **(headers or {})}
    return httpx.post(
        f"{url}/v1/completions", json={"prompt": SECRET, "max_tokens": 2, **body}, headers=sent, timeout=30
    )


def num_cached(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_the_prefix_cache_tells_no_tenant_what_another_one_sent(real: SimpleNamespace) -> None:
    assert num_cached(ask(real.url, "a")) == 0
    assert num_cached(ask(real.url, "a2")) > 0, "one tenant with two tokens shares with itself"
    for token in ("b", "own1", "own2", "front"):
        assert num_cached(ask(real.url, token)) == 0, token
    for token in ("b", "own1"):
        for headers, fields in (
            ({"x-paceline-tenant": "acme"}, {}),
            ({}, {"metadata": {"paceline_tenant": "acme"}}),
        ):
            answer = ask(real.url, token, headers, **fields)
            assert answer.status_code == 403 and "acme" in answer.json()["error"]["message"], answer.text
    assert num_cached(ask(real.url, "a", {"x-paceline-tenant": "acme"})) > 0, "its own name may be said"
    assert num_cached(ask(real.url, "front", {"x-paceline-tenant": "acme"})) > 0, "the service's own token names any"


@pytest.mark.parametrize("name", ["~own", "~" + "0" * 12])
def test_nobody_can_name_the_tenant_of_a_token_without_one(real: SimpleNamespace, name: str) -> None:
    for token in ("own1", "front"):
        assert ask(real.url, token, {"x-paceline-tenant": name}).status_code == 400


@pytest.mark.parametrize("token", ["", "x", "ops", "A"])
def test_other_tokens_open_nothing(real: SimpleNamespace, token: str) -> None:
    assert ask(real.url, token).status_code == 401


def test_two_clients_may_use_one_request_id_at_once_and_each_gets_it_back(scripted: SimpleNamespace) -> None:
    scripted.engine.go.clear()
    with ThreadPoolExecutor(4) as pool:
        sent = [pool.submit(ask, scripted.url, t, {"x-request-id": "mine"}) for t in ("a", "a2", "b", "own1")]
        wait_until(lambda: len(scripted.engine.requests) == 4)
        scripted.engine.go.set()
        answers = [s.result() for s in sent]
    assert [a.status_code for a in answers] == [200] * 4
    assert {a.headers["x-request-id"] for a in answers} == {"mine"}
    assert len({a.json()["id"] for a in answers}) == 4


def test_no_client_chooses_its_group_by_its_request_id(tokens: Tokens) -> None:
    """Ids are searched until their hash would hold them back: an attacker's best guess is no better than chance."""
    engine, share = ScriptedEngine("hi"), 10
    parts = ApiParts(client=engine, tokenizer=TOKENIZER, clients=Clients(tokens), holdback_percent=lambda: share)
    wanted = [i for i in (f"id-{k}" for k in range(5000)) if default_group(i, share) is Group.STATIC][:200]
    with serve_app(build_api(parts)) as url, httpx.Client(headers={"authorization": "Bearer b"}) as client:
        for i in wanted:
            body = {"prompt": [5], "max_tokens": 1}
            client.post(f"{url}/v1/completions", json=body, headers={"x-request-id": i}).raise_for_status()
    held_back = sum(r.group is Group.STATIC for r in engine.requests)
    assert held_back < 60, "20 are expected of 200, with a standard deviation of 4.2"
    assert not {r.request_id for r in engine.requests} & set(wanted)
    assert all(not r.is_asked for r in engine.requests)


def test_a_group_that_a_client_asks_for_is_served_and_counts_as_asked_for(scripted: SimpleNamespace) -> None:
    for group in Group:
        assert ask(scripted.url, "b", {"x-paceline-group": group.value}).status_code == 200
        sent = scripted.engine.requests[-1]
        assert (sent.group, sent.is_asked, sent.counted_group) == (group, True, "asked")


def test_buckets_of_a_tenant_are_those_that_its_limits_name(scripted: SimpleNamespace) -> None:
    for token, bucket, counted in (("a", "chat", "chat"), ("a", "finance", "other"), ("b", "finance", "finance")):
        assert ask(scripted.url, token, {"x-paceline-bucket": bucket}).status_code == 200
        assert scripted.engine.requests[-1].bucket == counted
        assert scripted.engine.requests[-1].tenant == {"a": "acme", "b": "bolt"}[token]


def test_what_a_tenants_text_trains_is_its_own_unless_its_limits_share_it(scripted: SimpleNamespace) -> None:
    named = {"x-paceline-tenant": "dove"}
    for token, headers, is_own in (
        ("a", {}, True),
        ("own1", {}, True),
        ("c", {}, False),
        ("front", named, True),
        ("front", {}, False),
    ):
        assert ask(scripted.url, token, headers).status_code == 200
        assert scripted.engine.requests[-1].is_own == is_own, (token, headers)
    with serve_app(build_api(ApiParts(client=scripted.engine, tokenizer=TOKENIZER, clients=Clients()))) as url:
        assert ask(url, headers=named).status_code == 200
        assert not scripted.engine.requests[-1].is_own, "nobody vouches for the name"


def test_unfinished_requests_and_bodies_are_limited_by_tenant(scripted: SimpleNamespace) -> None:
    big = ask(scripted.url, "a", prompt=[5] * 3000)
    assert big.status_code == 413 and "4000" in big.text
    scripted.engine.go.clear()
    with ThreadPoolExecutor(4) as pool:
        sent = [pool.submit(ask, scripted.url, t) for t in ("a", "a2", "a")]
        wait_until(lambda: len(scripted.engine.requests) == 3)
        for token in ("a", "a2"):
            late = ask(scripted.url, token)
            assert (late.status_code, late.json()["error"]["code"]) == (429, "limit_exceeded"), late.text
            assert int(late.headers["retry-after"]) >= 1
        other = pool.submit(ask, scripted.url, "b")
        scripted.engine.go.set()
        assert [s.result().status_code for s in (*sent, other)] == [200] * 4
    wait_until(lambda: ask(scripted.url, "a").status_code == 200)


def test_a_client_that_hangs_up_frees_its_place(scripted: SimpleNamespace) -> None:
    scripted.engine.go.clear()
    for _ in range(3):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{scripted.url}/v1/completions",
                json={"prompt": [5]},
                headers={"authorization": "Bearer a"},
                timeout=0.3,
            )
    scripted.engine.go.set()
    wait_until(lambda: ask(scripted.url, "a").status_code == 200)


def rated(
    url_limits: ClientLimits, tokens: Tokens | None = None, share: Callable[[], float] = lambda: 1.0
) -> tuple[ApiParts, list[float]]:
    now = [1000.0]
    clients = Clients(tokens or Tokens(api_token="k"), limits=url_limits, share=share, timer=lambda: now[0])
    return ApiParts(client=ScriptedEngine("hi"), tokenizer=TOKENIZER, clients=clients), now


def test_requests_beyond_the_rate_are_told_when_to_come_again_and_are_served_then() -> None:
    parts, now = rated(ClientLimits(requests_per_minute=6))
    with serve_app(build_api(parts)) as url:
        statuses = [ask(url, "k").status_code for _ in range(8)]
        assert statuses == [200] * 6 + [429] * 2
        refused = ask(url, "k")
        assert refused.json()["error"]["type"] == "rate_limit_error" and "6 a minute" in refused.text
        now[0] += float(refused.headers["retry-after"])
        assert ask(url, "k").status_code == 200 and ask(url, "k").status_code == 429
        models = httpx.get(f"{url}/v1/models", headers={"authorization": "Bearer k"})
        assert models.status_code == 200, "looking costs nothing"


def test_a_replica_keeps_to_its_part_of_the_rate_while_others_come_and_go() -> None:
    num_sharing = [1]
    parts, now = rated(ClientLimits(requests_per_minute=6), share=lambda: 1.0 / num_sharing[0])

    def statuses(url: str, number: int) -> list[int]:
        return [ask(url, "k").status_code for _ in range(number)]

    with serve_app(build_api(parts)) as url:
        assert statuses(url, 1) == [200]
        num_sharing[0] = 2
        assert statuses(url, 4) == [200] * 3 + [429], "what was saved up beyond the smaller part is gone"
        now[0] += 20.0
        assert statuses(url, 2) == [200, 429]
        num_sharing[0] = 1
        assert statuses(url, 1) == [429]
        now[0] += 20.0
        assert statuses(url, 3) == [200, 200, 429]


def test_tokens_beyond_the_rate_wait_until_the_answers_are_paid_for() -> None:
    parts, now = rated(ClientLimits(tokens_per_minute=120))
    with serve_app(build_api(parts)) as url:
        first = ask(url, "k", prompt=[5] * 100, max_tokens=40)
        used = first.json()["usage"]["total_tokens"]
        assert first.status_code == 200 and used > 100
        wait_until(lambda: ask(url, "k", prompt=[5] * 60).status_code == 429)
        refused = ask(url, "k", prompt=[5] * 60)
        wait_s = (used + 60 - 120) / 2
        assert wait_s <= float(refused.headers["retry-after"]) <= wait_s + 1
        now[0] += float(refused.headers["retry-after"])
        assert ask(url, "k", prompt=[5] * 60).status_code == 200


def test_a_prompt_larger_than_a_minutes_worth_comes_through_alone() -> None:
    now = [0.0]
    account = Account(ClientLimits(tokens_per_minute=60), 1.0, lambda: now[0])
    account.charge_prompt(600)
    with pytest.raises(Exception, match="a minute"):
        account.charge_prompt(1)
    now[0] = 541.0
    account.charge_prompt(1)


def test_a_replica_keeps_to_its_part_of_a_rate() -> None:
    half = Account(ClientLimits(requests_per_minute=10), 0.5, time.monotonic)
    for _ in range(5):
        half.begin(is_counted=True)
    with pytest.raises(Exception, match="10 a minute"):
        half.begin(is_counted=True)
    assert half.num_unfinished == 5, "who is refused holds no place"


def test_an_allowance_never_holds_more_than_a_minutes_worth() -> None:
    now = [0.0]
    allowance = Allowance(60, lambda: now[0])
    now[0] = 3600.0
    assert allowance.wait_s(60) == 0
    allowance.spend(60)
    assert allowance.wait_s(1) == 1.0


def test_addresses_without_a_token_have_a_bounded_number_of_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi import Request

    from paceline.serving.wire import accounts

    monkeypatch.setattr(accounts, "MAX_ACCOUNTS", 10)
    clients = Clients(limits=ClientLimits(max_unfinished=1))
    held = []
    for i in range(100):
        scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "client": (f"10.0.0.{i}", 1)}
        visit = clients.enter(Request(scope))
        held.append(visit) if i < 3 else visit.close()
    assert len(clients._accounts) <= 11
    with pytest.raises(Exception, match="at most 1 at once"):
        clients.enter(
            Request({"type": "http", "method": "POST", "path": "/", "headers": [], "client": ("10.0.0.0", 1)})
        )


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://evil.example", "content-type": "text/plain"}, 403),
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example:80", "origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"content-type": "text/plain"}, 200),
        ({"host": "localhost:1234"}, 200),
        ({}, 200),
    ],
)
def test_no_web_page_uses_the_model_of_the_computer_it_is_looked_at_on(headers: dict[str, str], status: int) -> None:
    parts = ApiParts(client=ScriptedEngine("hi"), tokenizer=TOKENIZER, clients=Clients(host="127.0.0.1"))
    with serve_app(build_api(parts)) as url:
        answer = httpx.post(f"{url}/v1/completions", content=b'{"prompt": [5]}', headers=headers)
        assert answer.status_code == status, answer.text
        own = httpx.post(f"{url}/v1/completions", content=b'{"prompt": [5]}', headers={"origin": url})
        assert own.status_code == 200, "the chat page"


def test_a_token_that_was_withdrawn_opens_nothing_a_moment_later(tmp_path) -> None:
    path = tmp_path / "tokens.yaml"
    path.write_text("tokens: [{token: old, tenant: acme}]")
    tokens = Tokens(file=path, reload_s=0.02).start()
    try:
        parts = ApiParts(client=ScriptedEngine("hi"), tokenizer=TOKENIZER, clients=Clients(tokens))
        with serve_app(build_api(parts)) as url:
            assert ask(url, "old").status_code == 200 and ask(url, "new").status_code == 401
            path.write_text("tokens: [{token: new, tenant: acme}, {token: x}]")
            wait_until(lambda: ask(url, "new").status_code == 200)
            assert ask(url, "old").status_code == 401
    finally:
        tokens.close()
