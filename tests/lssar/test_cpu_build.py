"""How the CPU kernel comes to a machine: compiled once and said so, cached, or in a wheel."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lssar import cpu, cpu_build

ROOT = Path(__file__).parents[2]
FAST = ("-std=c++17", "-shared", "-fPIC")  # built in a second

pytestmark = pytest.mark.skipif(cpu.unavailable() is not None, reason=str(cpu.unavailable()))

PROGRAM = f"""
import torch
from lssar import attend, cpu_build
from lssar.backends import used_backend
from lssar.mechanisms import MECHANISMS
cpu_build.FLAGS = {FAST}
q, k, v = torch.randn(3, 1, 2, 50, 16).unbind()
expected = attend(q, k, v, backend="eager")
assert (attend(q, k, v) - expected).abs().max() < 1e-4
print(used_backend(MECHANISMS["lssar"]))
"""
NOTICE = "lssar: compiling the CPU kernel, about 15 s, once per machine\n"


def start(cache: Path, **variables: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=os.environ | {"LSSAR_CACHE": str(cache), "CXX": ""} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_of_several_ranks_one_compiles_and_says_so_and_a_compiler_is_not_needed_again(tmp_path):
    ranks = [start(tmp_path) for _ in range(3)]
    said = [rank.communicate() for rank in ranks]
    assert sorted(said) == [("cpu\n", ""), ("cpu\n", ""), ("cpu\n", NOTICE)]
    without = start(tmp_path, PATH=str(tmp_path))
    assert without.communicate() == ("cpu\n", "")


@pytest.fixture
def beside_the_sources(tmp_path, monkeypatch):
    """Make a folder that stands for an installed package, whose kernels are built in a second."""
    for source in (cpu_build.SOURCE, *cpu_build.SOURCE.parent.glob("cpu_*.h")):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(cpu_build, "SOURCE", tmp_path / cpu_build.SOURCE.name)
    monkeypatch.setattr(cpu_build, "FLAGS", FAST)
    monkeypatch.setenv("LSSAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "")
    return tmp_path


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="no wheel")
def test_a_wheels_kernel_is_chosen_by_the_processor(beside_the_sources, monkeypatch):
    cpu_build.compile_shipped(beside_the_sources)
    avx2 = cpu_build.SHIPPED["avx2"][1]
    avx512 = cpu_build.SHIPPED["avx512"][1]
    cases = {"avx512": avx2 | avx512, "avx2": avx2 | {"avx512f"}}
    for variant, flags in cases.items():
        monkeypatch.setattr(cpu_build, "_cpu_flags", lambda flags=flags: flags)
        assert cpu_build.build() == cpu_build.shipped_path(variant), variant
    assert not (beside_the_sources / "cache").exists()
    monkeypatch.setattr(cpu_build, "_cpu_flags", lambda: {"sse2"})
    assert cpu_build.build().parent == beside_the_sources / "cache"  # compiled for this one


def test_a_wheels_kernel_that_does_not_load_is_compiled_instead(beside_the_sources, capfd):
    for variant, (_, needed) in cpu_build.SHIPPED.items():
        cpu_build.shipped_path(variant).write_bytes(b"\x7fELF of another system")
        assert needed
    assert cpu_build.build().parent == beside_the_sources / "cache"
    assert capfd.readouterr().err == NOTICE


def test_kernels_of_a_wheel_are_for_one_system(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_build.platform, "machine", lambda: "riscv64")
    with pytest.raises(cpu_build.Unavailable, match=r"for Linux on x86_64, this is \w+ on riscv64"):
        cpu_build.compile_shipped(tmp_path)
