"""The chunked loss is F.cross_entropy, with its gradients, whatever the chunks."""

import pytest
import torch
import torch.nn.functional as F
from cases import cases
from largest_tensor import LargestTensor

from modelling import losses
from modelling.losses import IGNORE, linear_cross_entropy, token_losses

CLASSES, ROWS, WIDTH = 37, 41, 12
# Logits at a time: one token; chunks that do and do not divide the 51 tokens; all at once.
CHUNKS = [1, 41, 41 * 5, 41 * 17, 41 * 50 + 3, 2**24]


def problem(shape=(3, 17), dtype=torch.float32, ignored=()):
    hidden = torch.randn(*shape, WIDTH, dtype=dtype).requires_grad_()
    weight = torch.randn(ROWS, WIDTH, dtype=dtype).requires_grad_()
    targets = torch.randint(CLASSES, shape)
    for index in ignored:
        targets.view(-1)[index] = IGNORE
    return hidden, weight, targets


def plain(hidden, weight, targets, **options):
    logits = (hidden @ weight.T)[..., :CLASSES].reshape(-1, CLASSES)
    return F.cross_entropy(logits.float(), targets.reshape(-1), ignore_index=IGNORE, **options)


def test_loss_and_gradients_equal_cross_entropy(monkeypatch):
    for chunk, ignored in cases(CHUNKS, [(), (0, 7, 50), tuple(range(50))]):
        monkeypatch.setattr(losses, "CHUNK_LOGITS", {"cpu": chunk, "default": 1})
        hidden, weight, targets = problem(ignored=ignored)
        for scale in cases([1.0, -0.37]):  # the incoming gradient reaches the precomputed ones
            got = scale * linear_cross_entropy(hidden, weight, targets, CLASSES)
            expected = scale * plain(hidden, weight, targets)
            torch.testing.assert_close(got, expected)
            for mine, theirs in zip(
                torch.autograd.grad(got, (hidden, weight)),
                torch.autograd.grad(expected, (hidden, weight)),
                strict=True,
            ):
                torch.testing.assert_close(mine, theirs)


def test_every_tokens_loss(monkeypatch):
    for chunk in cases(CHUNKS):
        monkeypatch.setattr(losses, "CHUNK_LOGITS", {"cpu": chunk, "default": 1})
        hidden, weight, targets = problem(ignored=(3, 20))
        got = token_losses(hidden, weight, targets, CLASSES)
        assert got.shape == targets.shape
        assert got.dtype == torch.float32
        assert not got.requires_grad
        torch.testing.assert_close(got.view(-1), plain(hidden, weight, targets, reduction="none"))
        assert (got[targets == IGNORE] == 0).all()


def test_padding_rows_take_no_probability_and_no_gradient():
    hidden, weight, targets = problem()
    with torch.no_grad():
        weight[CLASSES:] = 1e4  # would win every softmax that saw it
    loss = linear_cross_entropy(hidden, weight, targets, CLASSES)
    torch.testing.assert_close(loss, plain(hidden, weight, targets))
    (grad,) = torch.autograd.grad(loss, weight)
    assert (grad[CLASSES:] == 0).all()
    assert (grad[:CLASSES] != 0).any()


def test_a_batch_without_targets_costs_nothing():
    hidden, weight, targets = problem(ignored=range(51))
    loss = linear_cross_entropy(hidden, weight, targets, CLASSES)
    assert loss == 0
    assert all((g == 0).all() for g in torch.autograd.grad(loss, (hidden, weight)))


def test_enormous_logits_do_not_overflow():
    hidden, weight, targets = problem()
    hidden = (hidden.detach() * 1e4).requires_grad_()
    loss = linear_cross_entropy(hidden, weight, targets, CLASSES)
    torch.testing.assert_close(loss, plain(hidden, weight, targets))
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (hidden, weight)))


def test_a_target_outside_the_vocabulary_is_an_error():
    for wrong in cases([CLASSES, ROWS, -1, -99]):
        hidden, weight, targets = problem()
        targets[1, 4] = wrong
        with pytest.raises((RuntimeError, IndexError)):
            linear_cross_entropy(hidden, weight, targets, CLASSES)
        with pytest.raises((RuntimeError, IndexError)):
            token_losses(hidden, weight, targets, CLASSES)


def test_bf16_autocast_rounds_the_products_only():
    hidden, weight, targets = problem((4, 64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets, CLASSES)
        losses = token_losses(hidden, weight, targets, CLASSES)
    assert loss.dtype == losses.dtype == torch.float32
    exact = plain(hidden, weight, targets)
    torch.testing.assert_close(loss, exact, rtol=1e-2, atol=0)
    torch.testing.assert_close(losses.mean(), loss, rtol=1e-5, atol=0)
    got = torch.autograd.grad(loss, (hidden, weight))
    for mine, theirs in zip(got, torch.autograd.grad(exact, (hidden, weight)), strict=True):
        assert mine.dtype == torch.float32
        assert (mine - theirs).norm() / theirs.norm() < 2e-2


def test_the_logits_of_the_sequence_never_exist(monkeypatch):
    for training in cases([True, False]):
        monkeypatch.setattr(losses, "CHUNK_LOGITS", {"cpu": 16 * 512, "default": 1})
        hidden = torch.randn(1, 1000, 8).requires_grad_(training)
        weight = torch.randn(512, 8).requires_grad_(training)
        targets = torch.randint(500, (1, 1000))
        with LargestTensor() as largest:
            loss = linear_cross_entropy(hidden, weight, targets, 500)
            if training:
                loss.backward()
            token_losses(hidden, weight, targets, 500)
        assert largest.elements <= 16 * 512


def test_the_hidden_state_may_be_frozen():
    hidden, weight, targets = problem()
    loss = linear_cross_entropy(hidden.detach(), weight, targets, CLASSES)
    (grad,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(grad, torch.autograd.grad(plain(hidden, weight, targets), weight)[0])
