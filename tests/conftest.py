"""Every test starts from the same seeds, on one thread: two workers share two cores."""

import random

import numpy as np
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - whatever a library under test draws from it
    torch.manual_seed(0)
