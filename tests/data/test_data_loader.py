"""Batches are a pure function of (seed, step, global batch, length), whoever reads them."""

import numpy as np
import pytest
import torch
from cases import cases
from data_sets import write_set
from hypothesis import given, settings
from hypothesis import strategies as st

from data.loader import MixedLoader, Sequences, TrainLoader, permute, validation_batches
from data.shards import open_split
from lssar.errors import UserError

RNG = np.random.default_rng(7)
STREAM = RNG.integers(0, 50257, 3001, dtype=np.uint16)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Write 3,001 tokens in shards of awkward sizes, one of them empty, one of a single token."""
    folder = tmp_path_factory.mktemp("set")
    write_set(folder, train=np.split(STREAM, [997, 998, 998, 1500]), val=[STREAM])
    return open_split(folder, "train")


def loader(tokens, length=17, **changes):
    arguments = {"global_batch": 24, "seed": 3, "micro_batch": 2} | changes
    return TrainLoader(Sequences(tokens, length), **arguments)


def global_batch(tokens, step, world_size=1, **changes):
    """Return a step's sequences as all ranks together read them, in global order."""
    ranks = [
        list(loader(tokens, rank=r, world_size=world_size, **changes).micro_batches(step))
        for r in range(world_size)
    ]
    pairs = [ranks[r][part] for part in range(len(ranks[0])) for r in range(world_size)]
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


@given(size=st.integers(1, 5000), seed=st.integers(0, 2**63), epoch=st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_permute_is_one_to_one(size, seed, epoch):
    assert sorted(permute(np.arange(size), size, seed, epoch)) == list(range(size))


def test_permute_looks_random():
    """Serial correlation and fixed points as a random permutation would have them."""
    n = 10_007
    shuffled = permute(np.arange(n), n, seed=0, epoch=0).astype(float)
    assert abs(np.corrcoef(shuffled[:-1], shuffled[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(shuffled, np.arange(n))[0, 1]) < 0.05
    assert np.sum(shuffled == np.arange(n)) < 10


def test_permute_starts_at_once_for_a_hundred_billion_sequences():
    size = 10**11
    few = permute(np.arange(512) + 10**10, size, seed=1, epoch=2)
    assert len(set(few)) == 512
    assert few.min() >= 0
    assert few.max() < size


def test_inputs_and_targets_come_from_the_stream_across_shard_borders(tokens):
    for shuffle, step in cases([True, False], [0, 5, 11]):
        offsets = loader(tokens, shuffle=shuffle).offsets(step)
        x, y = global_batch(tokens, step, shuffle=shuffle)
        assert x.dtype == y.dtype == torch.int64
        for row, offset in enumerate(offsets):
            assert x[row].tolist() == STREAM[offset : offset + 17].tolist()
            assert y[row].tolist() == STREAM[offset + 1 : offset + 18].tolist()


def test_any_number_of_processes_and_micro_batches_sees_the_same_batch(tokens):
    divisions = [(1, 24), (1, 1), (2, 3), (8, 3), (3, 8)]
    for (world_size, micro_batch), step in cases(divisions, [0, 7, 40]):
        expected = global_batch(tokens, step)
        seen = global_batch(tokens, step, world_size, micro_batch=micro_batch)
        assert torch.equal(seen[0], expected[0])
        assert torch.equal(seen[1], expected[1])


def test_an_epoch_holds_every_window_once_and_the_next_another_order(tokens):
    reader = loader(tokens, global_batch=11, micro_batch=1)  # 176 sequences = 16 steps of 11
    assert reader.source.count == 3000 // 17 == 176
    epochs = [np.concatenate([reader.offsets(16 * e + s) for s in range(16)]) for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(0, 176 * 17, 17))
    assert (epochs[0] != epochs[1]).mean() > 0.9
    assert (epochs[1] != epochs[2]).mean() > 0.9


def test_a_step_may_straddle_two_epochs(tokens):
    reader = loader(tokens, global_batch=100)
    first = np.concatenate([reader.offsets(0), reader.offsets(1)])
    assert len(set(first[:176])) == 176
    assert set(reader.offsets(1)[76:]) <= set(range(0, 176 * 17, 17))


def test_the_seed_decides_the_order_and_zero_is_a_seed_like_any_other(tokens):
    orders = {tuple(loader(tokens, seed=seed).offsets(0)) for seed in range(5)}
    assert len(orders) == 5
    assert tuple(np.arange(24) * 17) not in orders


def test_without_shuffle_the_order_is_llm_c_s(tokens):
    """llm.c: rank r starts at r*B*T and advances by world*B*T."""
    world_size, micro, length = 2, 3, 17
    for rank in range(world_size):
        position = rank * micro * length
        reader = loader(
            tokens, shuffle=False, rank=rank, world_size=world_size, micro_batch=micro, seed=9
        )
        for step in range(3):
            for x, _ in reader.micro_batches(step):
                assert x.flatten().tolist() == STREAM[position : position + micro * length].tolist()
                position += world_size * micro * length


def test_a_resumed_loader_sees_what_the_first_would_have_seen(tokens):
    whole = loader(tokens, prefetch=True)
    seen = [torch.cat([x for x, _ in whole.micro_batches(step)]) for step in range(9)]
    resumed = loader(tokens)
    for step in (6, 7, 8, 2):
        again = torch.cat([x for x, _ in resumed.micro_batches(step)])
        assert torch.equal(again, seen[step])


def test_reading_ahead_survives_jumps_and_unfinished_steps(tokens):
    ahead, plain = loader(tokens, prefetch=True), loader(tokens)
    for step in (0, 1, 1, 9, 4, 5):
        got = next(iter(ahead.micro_batches(step)))
        assert torch.equal(got[0], next(iter(plain.micro_batches(step)))[0])


def test_an_impossible_batch_is_refused_with_the_numbers(tokens):
    with pytest.raises(UserError, match=r"24 sequences.*5 processes.*multiple of 10"):
        loader(tokens, world_size=5)


def test_too_few_tokens_for_one_sequence_is_refused(tokens):
    one = {"global_batch": 1, "micro_batch": 1}
    assert loader(tokens, length=3000, **one).source.count == 1
    with pytest.raises(UserError, match=r"3001 training tokens.*length 3001.*length = 3000"):
        loader(tokens, length=3001, **one)


def test_a_step_of_more_sequences_than_there_are_is_refused_with_the_most_that_are(tokens):
    assert loader(tokens, global_batch=176, micro_batch=16).source.count == 176
    with pytest.raises(UserError, match=r"176 training sequences.*180 of one step.*to 2958 .now"):
        loader(tokens, global_batch=180, micro_batch=6)  # 2958 = 17 tokens x 174 sequences


def test_a_token_outside_the_vocabulary_is_refused_naming_the_shard(tmp_path):
    bad = np.zeros(20_000, dtype=np.uint16)
    bad[15_000] = 300  # beyond the sample that opening looks at
    write_set(tmp_path, train=[bad[:9000], bad[9000:]])
    reader = loader(open_split(tmp_path, "train", vocab_size=257), shuffle=False)
    with pytest.raises(UserError, match=r"x_train_000001\.bin, token 6000 holds token 300"):
        for step in range(100):
            list(reader.micro_batches(step))


def targets(tokens, length, **changes):
    arguments = {"total_tokens": 1024, "batch": 3} | changes
    return [y for _, y in validation_batches(Sequences(tokens, length), **arguments)]


def test_validation_has_the_same_targets_at_every_length(tokens):
    for length in (1, 16, 64, 128):
        flat = torch.cat([y.flatten() for y in targets(tokens, length)])
        assert flat.tolist() == STREAM[1:1025].tolist()


def test_validation_inputs_precede_their_targets(tokens):
    for x, y in validation_batches(Sequences(tokens, 64), total_tokens=1024, batch=5):
        assert torch.equal(x[:, 1:], y[:, :-1])


def test_ranks_share_the_validation_sequences(tokens):
    for world_size in cases([2, 3, 8]):
        shares = [
            row.tolist()
            for rank in range(world_size)
            for y in targets(tokens, 64, rank=rank, world_size=world_size)
            for row in y
        ]
        alone = [row.tolist() for y in targets(tokens, 64) for row in y]
        assert sorted(shares) == sorted(alone)


def test_impossible_validation_is_refused_at_the_call(tokens):
    with pytest.raises(UserError, match=r"1000 validation tokens .* sequences of 64"):
        validation_batches(Sequences(tokens, 64), total_tokens=1000, batch=1)
    with pytest.raises(UserError, match="has 3001 validation tokens, too few for 6400"):
        validation_batches(Sequences(tokens, 64), total_tokens=6400, batch=1)
    with pytest.raises(UserError, match="multiple"):
        validation_batches(Sequences(tokens, 64), total_tokens=0, batch=1)


def test_every_third_step_is_the_next_one_of_the_long_loader(tokens):
    usual, long = loader(tokens), loader(tokens, length=34, global_batch=12, micro_batch=1)
    mixed, found = MixedLoader(usual, long, interval=3), []
    for step in range(9):
        (x, y), *rest = list(mixed.micro_batches(step))
        assert x.numel() * (1 + len(rest)) == 24 * 17  # as many tokens per step at any length
        assert mixed.divisors(step) == [12] * 12
        assert x[0].tolist() == STREAM[mixed.offsets(step)[0] :][: x.shape[1]].tolist()
        assert y[0].tolist() == STREAM[mixed.offsets(step)[0] + 1 :][: x.shape[1]].tolist()
        found.append(mixed.offsets(step).tolist())
    assert found[2::3] == [long.offsets(n).tolist() for n in range(3)]
    del found[2::3]
    assert found == [usual.offsets(n).tolist() for n in range(6)]
