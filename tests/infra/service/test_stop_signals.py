"""Signals are noted, raise nothing in the middle of other code, and stay with the command while a library starts."""

import os
import signal
import threading

import pytest

from paceline.infra.service.stop_signals import SIGNALS, StopSignals, kept_sigterm


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_raises_where_it_is_asked_for_and_nowhere_else(number):
    before = signal.getsignal(number)
    if before == signal.SIG_IGN:  # these tests run under nohup
        signal.signal(number, before := signal.SIG_DFL)
    with StopSignals() as signals:
        signals.check()
        os.kill(os.getpid(), number)
        assert signals.stop.wait(5)
        with pytest.raises(KeyboardInterrupt):
            signals.check()
    assert signal.getsignal(number) == before


def test_a_terminals_end_is_left_ignored_where_it_is():
    """`nohup paceline serve` goes on."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            signals.check()
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_ctrl_c_does_not_wait():
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.stop.wait(5)
        os.kill(os.getpid(), signal.SIGTERM)  # what a supervisor repeats stays quiet
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_library_that_takes_sigterm_gives_it_back():
    with StopSignals() as signals:
        with kept_sigterm():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.stop.wait(5)


@pytest.mark.parametrize("taken", [signal.SIG_IGN, lambda *_: None])
def test_a_sigterm_that_a_library_swallows_is_handled_afterwards(taken):
    with StopSignals() as signals:
        with kept_sigterm():
            signal.signal(signal.SIGTERM, taken)
            os.kill(os.getpid(), signal.SIGTERM)
            assert not signals.stop.is_set()
        assert signals.stop.is_set() == callable(taken), "what the library has ignored does not come at all"


def test_other_threads_may_start_a_service_too():
    errors = []

    def run():
        try:
            with kept_sigterm():
                pass
        except Exception as e:
            errors.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(5)
    assert not errors and not thread.is_alive()
