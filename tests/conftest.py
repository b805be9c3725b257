"""Every test starts from the same seeds, on one thread: two workers share two cores."""

import os

# Some virtual machines announce AMX and do not have it: the first bf16 product would be the end of
# the process. oneDNN reads this at its first use, so it stands before torch is imported; commands
# find out by themselves (training.distributed.autocast).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import random

import numpy as np
import pytest
import torch

from lssar.cache import ensure_hub_cache

torch.set_num_threads(1)
ensure_hub_cache()  # before a test module imports what reads it


LONG = ("test_gpu_check", "test_kernel_triton", "test_drill", "test_gpu_rehearsal", "test_nodes")


def pytest_collection_modifyitems(items):
    """Minutes of one test at the end would leave the other workers without work."""
    items.sort(key=lambda item: item.path.stem not in LONG)


def pytest_terminal_summary(terminalreporter):
    """Skipped tests are a letter among thousands; whoever lacks the browser reads it here, once."""
    skipped = terminalreporter.stats.get("skipped", [])
    count = sum("scripts/browser.sh" in str(report.longrepr) for report in skipped)
    if count:
        terminalreporter.write_line(
            f"{count} tests of the report page were skipped, as no browser is here; "
            "`bash scripts/browser.sh` installs it"
        )


@pytest.fixture(autouse=True)
def seeded():
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - whatever a library under test draws from it
    torch.manual_seed(0)
