"""benchmark.py spans: every span computes what it says, and is compared with the right thing."""

from argparse import Namespace

import pytest
import torch
from cases import cases

import benchmark
from benchmarks import attention_study as bench
from benchmarks.attention_study import Case, make_inputs, steps_of
from evaluating.results import read_results
from lssar.errors import UserError
from lssar.mechanisms import get_mechanism


def test_every_span_computes_what_it_says():
    for seen in cases(sorted({s for pair in bench.SPANS.values() for s in pair})):
        sizes = {"batch": 1, "heads": 8, "head_dim": 8}
        options = Namespace(**sizes, device="cpu", dtype="fp32", inputs="random")
        q, k, v, _ = inputs = make_inputs(options, 300)
        case = Case(get_mechanism("softmax"), "cpu", 300, seen=seen)
        out = steps_of(case, inputs)[0]()
        row, key = torch.arange(300)[:, None], torch.arange(300)
        visible = key <= row
        if seen == bench.WINDOW:
            visible &= key > row - 128
        if seen == bench.DOCUMENTS:
            visible &= key // 256 == row // 256
        if seen in (bench.GROUPED, bench.COPIED):
            k, v = (x[:, :4].repeat_interleave(2, dim=1) for x in (k, v))
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
        expected = scores.softmax(-1) @ v
        expected = expected[:, :, -1:] if seen == bench.ONE_ROW else expected
        if seen == bench.EIGHT:
            starts = [300 * i // 16 for i in range(8)]
            parts = (scores[:, :, -1:, n:].softmax(-1) @ v[:, :, n:] for n in starts)
            expected = torch.cat(list(parts))
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_a_span_is_compared_with_the_same_without_it(tmp_path, capsys):
    options = ["--lengths=300", "--rounds=3", "--mechanisms=lssar", "--threads=1"]
    assert not benchmark.main(["spans", *options, "--out", str(tmp_path / "x.json")])
    found = {(r.variant, r.quantity): r.value for r in read_results(tmp_path / "x.json").records}
    own = "cpu, random, 1 thread"
    for seen, other in (
        (f"{own}, {bench.WINDOW}", own),
        (f"{own}, {bench.GROUPED}", f"{own}, {bench.COPIED}"),
        (f"{own}, {bench.ONE_ROW}", f"sdpa, random, 1 thread, {bench.ONE_ROW}"),
        (f"{own}, {bench.EIGHT}", f"sdpa, random, 1 thread, {bench.EIGHT}"),
    ):
        share = found[seen, "forward_ms"] / found[other, "forward_ms"]
        assert found[seen, "forward_share"] == pytest.approx(share)
    assert "window of 128" in capsys.readouterr().out and (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    "chosen, seen",
    [("window", {"1 thread", bench.WINDOW}), ("decode", {bench.ONE_ROW, bench.EIGHT})],
)
def test_only_the_chosen_spans_are_measured(tmp_path, chosen, seen):
    options = ["--lengths=64", "--rounds=3", "--mechanisms=lssar", "--threads=1"]
    out = tmp_path / "x.json"
    assert not benchmark.main(["spans", *options, f"--spans={chosen}", "--out", str(out)])
    assert {r.variant.rpartition(", ")[2] for r in read_results(out).records} == seen


def test_a_mistyped_mechanism_is_one_line():
    with pytest.raises(UserError, match="--mechanisms: unknown 'softmx'; did you mean 'softmax'"):
        benchmark.main(["spans", "--mechanisms", "softmx"])
