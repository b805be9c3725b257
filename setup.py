"""Build the package, whose settings are in pyproject.toml.

    LSSAR_KERNELS=1 pip wheel --no-deps -w dist .

makes a wheel for Linux on x86-64 with the compiled CPU kernels inside, for AVX-512 and for AVX2:
who installs it needs no compiler. Without the variable the wheel is for any system, and the kernel
is compiled at the first call.
"""

import os
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))

from lssar.cpu_build import compile_shipped

WITH_KERNELS = os.environ.get("LSSAR_KERNELS") == "1"


class Build(build_py):
    def run(self) -> None:
        super().run()
        if WITH_KERNELS:
            compile_shipped(Path(self.build_lib) / "lssar")


class Wheel(bdist_wheel):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = not WITH_KERNELS

    def get_tag(self) -> tuple[str, str, str]:
        """Accept any Python of the system: the kernel is called through ctypes."""
        _, _, system = super().get_tag()
        return "py3", "none", system


setup(cmdclass={"build_py": Build, "bdist_wheel": Wheel})
