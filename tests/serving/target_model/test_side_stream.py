"""Side work of a device runs on one stream behind what is queued, and is done when its block is."""

import contextlib
from types import SimpleNamespace

import torch

from paceline.serving.target_model.device import side_stream


def test_every_block_of_a_device_takes_the_same_stream(monkeypatch):
    """Torch keeps what a stream gave back for that stream: new ones would take a load's memory again at every load."""
    said = []

    def stream(device):
        return SimpleNamespace(wait_stream=lambda other: said.append(f"{device} waits for {other}"))

    event = SimpleNamespace(
        record=lambda _: said.append("end"), synchronize=lambda: said.append("waited for the end")
    )  # fmt: skip
    fakes = {
        "Stream": stream, "Event": lambda: event, "default_stream": lambda device: f"default of {device}",
        "stream": lambda own: contextlib.nullcontext(said.append(id(own))),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for _ in range(3):
        with side_stream("cuda:77"):
            said.append("work")
    first, own, *rest = said[:5]
    assert (first, rest) == ("cuda:77 waits for default of cuda:77", ["work", "end", "waited for the end"])
    assert said == [first, own, *rest] * 3


def test_other_devices_have_none():
    for device in ("cpu", None):
        with side_stream(device):
            pass
