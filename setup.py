"""Build step that pyproject.toml cannot state: the native round is compiled where there is a compiler."""

import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

spec = importlib.util.spec_from_file_location("native_build", Path(__file__).parent / "kernels" / "cpu" / "build.py")
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)


class BuildNative(build_ext):
    """Runs the compiler if these sources are not compiled yet; without one the package is installed all the same, for torch."""

    def get_ext_filename(self, fullname):
        return str(Path(*fullname.split(".")[:-1], native.NAME))

    def build_extension(self, ext):
        try:
            native.provide(Path(self.get_ext_fullpath(ext.name)).parent)
        except native.BuildError as e:
            print(f"paceline: native CPU rounds are not built: {e}", file=sys.stderr)


class AnyPython(bdist_wheel):
    """The library knows nothing of Python: one wheel for all versions of it."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


def needs() -> list[str]:
    """What the build needs beside setuptools: a compiler from a wheel where the system has none."""
    try:
        native.find_compilers()
    except native.BuildError:
        return ["ziglang"]
    return []


setup(
    setup_requires=needs(),
    ext_modules=[Extension("paceline.kernels.cpu.libround", sources=[], optional=True)],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": AnyPython},
)
