"""A small corpus and a run on it, for all tests of training."""

import pytest
from train_helpers import arguments, make_corpus, train_here


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def whole_run(corpus, tmp_path_factory):
    """Train a run that nothing interrupts."""
    runs = tmp_path_factory.mktemp("whole")
    assert train_here(*arguments(corpus, runs)) == 0
    return runs / "nano-lssar"
