"""Every test starts from the same seeds, on one thread: two workers share two cores."""

import random

import numpy as np
import pytest
import torch

torch.set_num_threads(1)


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
