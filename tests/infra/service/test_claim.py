"""Claims of infra/service/claim.py: a service's name is one application's, also when several want it at once."""

from types import SimpleNamespace

import pytest

from paceline.config import ServiceConfig
from paceline.errors import ConfigError
from paceline.infra.service import claim as claim_module
from paceline.infra.service.claim import check_claim, claim

CONFIG = ServiceConfig()


class Cluster:
    """Ray's key-value store and Serve's list of applications."""

    def __init__(self, *applications: str) -> None:
        self.applications, self.values = set(applications), {}
        self.on_status = lambda: None

    def _internal_kv_get(self, key: str, namespace: str) -> bytes | None:
        return self.values.get(key)

    def _internal_kv_put(self, key: str, value: str, overwrite: bool, namespace: str) -> bool:
        is_there = key in self.values
        if overwrite or not is_there:
            self.values[key] = value.encode()
        return is_there

    def status(self) -> SimpleNamespace:
        on_status, self.on_status = self.on_status, lambda: None
        on_status()
        return SimpleNamespace(applications=self.applications)


@pytest.fixture
def cluster(monkeypatch) -> Cluster:
    made = Cluster("a", "b")
    monkeypatch.setattr(claim_module, "internal_kv", made)
    monkeypatch.setattr(claim_module, "serve", made)
    return made


def test_a_name_is_one_applications_until_that_is_gone(cluster):
    claim(CONFIG, "a")
    claim(CONFIG, "a")  # another replica of it
    with pytest.raises(ConfigError, match="which application 'a'"):
        claim(CONFIG, "b")
    cluster.applications.remove("a")
    claim(CONFIG, "b")
    cluster.applications.add("a")
    with pytest.raises(ConfigError, match="which application 'b'"):
        check_claim(CONFIG, "a")
    check_claim(ServiceConfig(model_name="other"), "a")


def test_of_two_that_find_the_same_one_gone_only_one_takes_over(cluster):
    cluster.applications.add("gone")
    claim(CONFIG, "gone")
    cluster.applications.remove("gone")
    cluster.on_status = lambda: claim(CONFIG, "b")  # while a has seen what was there before
    with pytest.raises(ConfigError, match="which application 'b'"):
        claim(CONFIG, "a")
    check_claim(CONFIG, "b")
