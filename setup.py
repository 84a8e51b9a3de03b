"""Compiles the CPU kernels when the package is built; everything else about the package stands in pyproject.toml.

One idea: to setuptools the library is an optional extension module, so that wheels, editable installations and platform
tags follow; it is compiled by the same code as at first use. Where that fails the package goes without the library, and
first use tries again.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import FileError

KERNELS = Path(__file__).parent / "src" / "stageline" / "kernels"


def _load_build() -> ModuleType:
    """stageline.kernels.build by its path: importing the package would need torch."""
    spec = importlib.util.spec_from_file_location("build", KERNELS / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = _load_build()


class BuildKernels(build_ext):
    """Makes the extension's file, under its own name, by `stageline.kernels.build`."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name))
        if self.editable_mode and build.packaged_library().exists():
            return
        try:
            library.parent.mkdir(parents=True, exist_ok=True)
            _remove_others(library)
            build.compile_library(build.find_compiler(), library)
        except (build.KernelBuildError, OSError) as error:
            self.warn(f"the CPU kernels are not compiled now, first use tries again: {error}")

    def copy_extensions_to_source(self) -> None:
        try:
            super().copy_extensions_to_source()
            _remove_others(build.packaged_library())
        except (FileError, OSError) as error:
            self.warn(f"the CPU kernels cannot be put into the package, first use compiles them: {error}")


def _remove_others(library: Path) -> None:
    """Nobody loads a library of other sources any more."""
    for old in library.parent.glob("prebuilt-*.so"):
        if old.name != library.name:
            old.unlink()


setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[Extension(f"stageline.kernels.{build.packaged_library().stem}", sources=[], optional=True)],
)
