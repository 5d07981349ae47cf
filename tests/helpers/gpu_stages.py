"""Stages of a check that end badly in every way, for tests of what runs them; none imports torch."""

import ctypes
import importlib
import os
import time

from paceline.bench.gpu_check.stages import Stage


def named(*names, share=1.0, **changes):
    """Stages of this module."""
    return tuple(
        Stage(name=n, entry=f"tests.helpers.gpu_stages:{n}", share=share, question=f"does {n} end?", **changes)
        for n in names
    )


def fine(check):
    check.save("all is well", left_s=check.left_s(), is_dry=check.is_dry)


def wrong(check):
    check.save("half done", rows=[1, 2])
    print("on the way to the fault", flush=True)
    raise ValueError("the device answered 42")


def blamed(check):
    """Comes to its end and has found that something is wrong."""
    check.fault("")
    check.save("7 of 8 kernels right", rows=[1])
    check.fault("a kernel is wrong")
    check.fault("a later reason")
    check.save(more=2)


def missing(check):
    importlib.import_module("a_package_that_nobody_has.part")


def hang(check):
    """As a CUDA call that never returns, the interpreter's lock in hand."""
    check.save("begun", rows=[1])
    ctypes.PyDLL(None).sleep(600)


def children(check):
    """Leaves a process behind that would run for ever."""
    import subprocess

    child = subprocess.Popen(["sleep", "600"])
    check.save("begun", pid=child.pid)
    time.sleep(600)


def die(check):
    os._exit(7)


def numbers(check):
    check.save("odd numbers", nan=float("nan"), inf=[float("inf")], deep={"round_ms": 1.5, 3: 4})


def carried(check):
    """Imports what a carried wheel holds."""
    check.save("imported", value=importlib.import_module("carried_package").VALUE)
