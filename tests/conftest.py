"""Sort the tests into tiers, and start every test from the same seeds on one thread."""

import os

# Some virtual machines announce AMX and do not have it: the first bf16 product would end the
# process. oneDNN reads this at its first use, so it stands before torch is imported; commands find
# out by themselves (training.distributed.autocast).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

from pathlib import Path

import cases
import pytest
import torch

from lssar.folders import ensure_hub_cache

torch.set_num_threads(1)
ensure_hub_cache()  # before a test module imports what reads it

TESTS = Path(__file__).parent
# Patterns of the files of each tier below tests/; every other file is of the default tier.
TIERS = {
    "gpu-rehearsal": (
        "test_gpu_rehearsal.py",
        "test_single_gpu.py",
        "lssar/test_kernel_triton.py",
        "benchmarks/test_gpu_check.py",
        "benchmarks/test_triton_*.py",
    ),
    "ecosystem": (
        "lssar/test_hf_*.py",
        "lssar/test_install.py",
        "evaluating/test_hf_*.py",
        "evaluating/test_lm_eval_*.py",
        "evaluating/test_downstream*.py",
        "evaluating/test_convert_llama.py",
        "paper/test_*browser.py",
    ),
    "physics": ("physics/*.py",),
    "drill": (
        "test_drill.py",
        "training/test_several_processes.py",
        "evaluating/test_eval_memory.py",
    ),
}


def tier_of(path: Path) -> str:
    name = path.relative_to(TESTS)
    for tier, patterns in TIERS.items():
        if any(name.match(pattern) for pattern in patterns):
            return tier
    return "default"


def pytest_addoption(parser):
    parser.addoption("--tier", choices=("default", *TIERS), help="run the tests of this tier alone")


def pytest_ignore_collect(collection_path: Path, config) -> bool | None:
    """Leave out other tiers before they are imported: their packages may not be installed."""
    tier = config.getoption("--tier")
    is_test = collection_path.name.startswith("test_")
    if tier and is_test and tier_of(collection_path) != tier:
        return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call):
    """Name the case at which a loop failed."""
    if call.excinfo and cases.running:
        call.excinfo.value.add_note(f"case: {', '.join(map(repr, cases.running))}")


@pytest.fixture(autouse=True)
def seeded():
    cases.running.clear()
    cases.seed_everything()
