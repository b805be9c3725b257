"""GPT.generate and GPT.stream: greedy, sampled, filtered, stopped, streamed."""

import pytest
import torch
from cases import cases
from eval_helpers import small_gpt

from lssar.mechanisms import MECHANISMS
from model import sample

DRAWS = 20000


def frequencies(logits, **options):
    generator = torch.Generator().manual_seed(3)
    drawn = sample(logits.expand(DRAWS, -1), generator=generator, **options)
    return torch.bincount(drawn, minlength=logits.shape[-1]) / DRAWS


LOGITS = torch.tensor([0.3, 2.0, -1.0, 1.5, 0.0, 1.2])


def test_temperature_divides_the_logits():
    for temperature in cases([0.5, 1.0, 2.0]):
        expected = (LOGITS / temperature).softmax(-1)
        got = frequencies(LOGITS, temperature=temperature)
        torch.testing.assert_close(got, expected, rtol=0, atol=0.015)


def test_zero_temperature_is_the_argmax():
    assert sample(torch.stack((LOGITS, -LOGITS)), temperature=0).tolist() == [1, 2]


def test_top_k_keeps_the_k_likeliest_in_proportion():
    for top_k, kept in cases([(1, [1]), (2, [1, 3]), (3, [1, 3, 5]), (99, range(6))]):
        expected = torch.zeros(6)
        expected[list(kept)] = LOGITS[list(kept)].softmax(-1)
        torch.testing.assert_close(frequencies(LOGITS, top_k=top_k), expected, rtol=0, atol=0.015)


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    """The probabilities are 0.075, 0.412, 0.021, 0.250, 0.056, 0.185."""
    examples = [(0.01, [1]), (0.39, [1]), (0.45, [1, 3]), (0.7, [1, 3, 5]), (1.0, range(6))]
    for top_p, kept in cases(examples):
        expected = torch.zeros(6)
        expected[list(kept)] = LOGITS[list(kept)].softmax(-1)
        torch.testing.assert_close(frequencies(LOGITS, top_p=top_p), expected, rtol=0, atol=0.015)


def test_top_p_is_measured_at_the_temperature_and_rows_are_filtered_apart():
    rows = torch.stack((LOGITS, LOGITS.flip(0)))
    drawn = sample(rows.repeat(500, 1), temperature=0.1, top_p=0.9)
    assert set(drawn[0::2].tolist()) == {1}
    assert set(drawn[1::2].tolist()) == {4}


def test_greedy_generation_equals_repeated_full_passes():
    for name in cases(["softmax", "lssar", "ssmax", "relu-shen", "stick-breaking"]):
        model, prompt = small_gpt(name), torch.randint(61, (2, 7))
        got = model.generate(prompt, 12, temperature=0)
        slow = prompt
        with torch.no_grad():
            for _ in range(12):
                logits = model(slow)[:, -1]
                top = logits.topk(2).values
                # Where two logits are within rounding of each other either token is right.
                if (top[:, 0] - top[:, 1]).amin() < 3e-5 * logits.abs().amax():
                    break
                slow = torch.cat((slow, logits.argmax(-1, keepdim=True)), 1)
        assert slow.shape[1] > prompt.shape[1]
        assert torch.equal(got[:, : slow.shape[1]], slow)
        assert got.shape == (2, 19)


def test_streaming_equals_generating_and_a_seed_repeats_it():
    model, prompt = small_gpt(), torch.randint(61, (3, 5))

    def options():
        generator = torch.Generator().manual_seed(11)
        return {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "generator": generator}

    whole = model.generate(prompt, 9, **options())
    parts = list(model.stream(prompt, 9, **options()))
    assert len(parts) == 9
    assert all(part.shape == (3,) for part in parts)
    assert torch.equal(torch.stack(parts, 1), whole[:, 5:])
    assert torch.equal(whole[:, :5], prompt)


def test_a_stream_can_be_left_at_any_token():
    stream = small_gpt().stream(torch.randint(61, (1, 3)), 1000)
    for _, token in zip(range(3), stream, strict=False):
        assert 0 <= token.item() < 61
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_stop_tokens_end_each_sequence_by_itself():
    model, prompt = small_gpt(), torch.randint(61, (6, 4))
    free = model.generate(prompt, 30, temperature=0)[:, 4:]
    stop = (free[0, 3].item(), free[1, 5].item())
    stopped = model.generate(prompt, 30, temperature=0, stop=stop)[:, 4:]
    ends = []
    for sequence, reference in zip(stopped.tolist(), free.tolist(), strict=True):
        end = next((i for i, t in enumerate(reference) if t in stop), len(reference))
        shown = min(end + 1, len(sequence))
        assert sequence[:shown] == reference[:shown]
        assert all(token == reference[end] for token in sequence[shown:])
        ends.append(end)
    assert min(ends) < max(ends)
    assert stopped.shape[1] == min(30, max(ends) + 1)


def test_generation_ends_at_once_when_all_have_stopped():
    model, prompt = small_gpt(), torch.randint(61, (1, 4))
    first = model.generate(prompt, 1, temperature=0)[0, -1].item()
    assert model.generate(prompt, 50, temperature=0, stop=(first,)).shape == (1, 5)
    assert torch.equal(model.generate(prompt, 0), prompt)


def test_padding_rows_of_the_vocabulary_are_never_sampled():
    model = small_gpt()
    with torch.no_grad():
        model.embedding.weight[61:] = 100 * model.embedding.weight[:3].sign()
    out = model.generate(torch.randint(61, (64, 2)), 20, temperature=5.0)
    assert out.max() < 61
    assert model(out).shape[-1] == 61


def test_generation_outlives_the_training_length():
    model = small_gpt("lssar")
    model.configure(attention=MECHANISMS["lssar"], interpolation=1.0)
    assert model.generate(torch.randint(61, (1, 150)), 5, temperature=0).shape == (1, 155)


def test_impossible_sampling_options_are_refused_by_name():
    impossible = [("temperature", -1.0), ("top_k", 0), ("top_k", -3), ("top_p", 0), ("top_p", 1.5)]
    for option, value in cases(impossible):
        with pytest.raises(ValueError, match=option):
            small_gpt().generate(torch.randint(61, (1, 4)), 2, **{option: value})
