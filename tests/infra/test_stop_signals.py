"""Signals are noted whatever became of the exception, also behind a library that took the handler for itself."""

import os
import signal
import sys

import pytest

from paceline.infra.stop_signals import SIGNALS, StopSignals


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_raises_at_once_and_stays_noted(number):
    before = signal.getsignal(number)
    with StopSignals(raises=True) as signals:
        signals.check()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            signals.check()
    assert signal.getsignal(number) == before


def test_an_exception_lost_in_a_finalizer_is_not_lost_for_good(monkeypatch):
    class Finalized:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)

    lost = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    with StopSignals(raises=True) as signals:
        thing = Finalized()
        del thing
        assert [u.exc_type for u in lost] == [KeyboardInterrupt]
        with pytest.raises(KeyboardInterrupt):
            signals.check()


def test_installed_again_it_replaces_what_a_library_put_there():
    with StopSignals(raises=False) as signals:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not signals.stop.is_set()
        signals.install()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.stop.is_set()
