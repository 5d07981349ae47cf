"""The ingress goes on asking its engines whatever becomes of a call."""

import asyncio
from types import SimpleNamespace

import pytest

from paceline.infra.service import ingress
from paceline.infra.service.ingress import ResumeIngress


def ingress_of(answer):
    """An ingress whose engines answer so, and what it heard."""
    heard = []
    made = SimpleNamespace(
        _engines=SimpleNamespace(facts=SimpleNamespace(remote=answer)), _config=SimpleNamespace(model="m"),
        _client=SimpleNamespace(heard=heard.append), _ask=lambda: ResumeIngress._ask(made),
    )  # fmt: skip
    return made, heard


@pytest.mark.parametrize("error", [asyncio.CancelledError, RuntimeError, TimeoutError])
def test_a_call_that_serve_cancelled_or_that_failed_does_not_end_the_probing(error, monkeypatch):
    facts, calls = SimpleNamespace(model="m"), []
    monkeypatch.setattr(ingress, "PROBE_S", 0.01)
    monkeypatch.setattr(ingress, "decode_facts", lambda raw: raw)

    async def answer():
        calls.append(1)
        if len(calls) == 2:
            raise error  # as Ray's DeploymentResponse does
        return facts

    async def probed():
        made, heard = ingress_of(answer)
        task = asyncio.create_task(ResumeIngress._probe(made))
        while len(heard) < 4:
            assert not task.done()
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(probed(), 20))


def test_an_end_of_the_ingress_ends_a_call_that_waits(monkeypatch):
    async def ended():
        made, _ = ingress_of(lambda: asyncio.sleep(60))
        task = asyncio.create_task(made._ask())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(ended(), 20))
