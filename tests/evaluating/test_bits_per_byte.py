"""Bits per byte of text: the same arithmetic for any tokeniser, in training and evaluation."""

import json
import math

import pytest
import report_results as made
from train_helpers import ROOT, TINY, train_here

import eval_extrapolation
from data.prepare import main as prepare
from data.shards import open_split
from data.tokeniser import get_tokeniser, text_bytes
from evaluating.results import HEAD, read_results
from paper.evidence import Evidence
from paper.experiments import SCALES, all_tables
from paper.table_figures import by_length
from support import files

TEXT = "Les œufs — ça va, naïve? 🙂 <|endoftext|> \t\tand    the end.\n"
VOCABULARY = ("--model.vocab_size=50257", "--model.vocab_rows=50304")
SHORT = ("--train.steps=1", "--train.warmup=0", "--log.name=run")


@pytest.fixture(scope="module", params=["bytes", "gpt2"])
def trained(request, tmp_path_factory):
    """(tokeniser, corpus, run): one step of training on documents of odd text."""
    here = tmp_path_factory.mktemp(request.param)
    (here / "text").mkdir()
    for i in range(60):
        (here / f"text/{i:02d}.txt").write_text(TEXT * (1 + i % 5))
    text, corpus = str(here / "text"), str(here / "corpus")
    assert not prepare(["text", text, "--out", corpus, f"--tokeniser={request.param}",
                        "--val-tokens=1000"])  # fmt: skip
    more = (f"--data.directory={corpus}", f"--log.directory={here}", *SHORT)
    more += VOCABULARY if request.param == "gpt2" else ()
    assert train_here(str(ROOT / "configs/nano-softmax.toml"), *TINY, *more) == 0
    return get_tokeniser(request.param), corpus, here / "run"


def bytes_of(tokeniser, ids: list[int]) -> int:
    """By the tokenisers' own decoders, with nothing for an end of text."""
    ids = [i for i in ids if i != tokeniser.eot]
    return len(ids) if tokeniser.name == "bytes" else len(tokeniser._bpe.decode_bytes(ids))


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_the_bytes_of_tokens_are_those_of_their_text(name):
    tokeniser = get_tokeniser(name)
    ids = [*tokeniser.encode(TEXT).tolist(), tokeniser.eot]
    assert tokeniser.byte_lengths[ids].sum() == len(TEXT.encode())
    assert text_bytes(name)[tokeniser.eot] == text_bytes(name)[50300] == 0
    assert text_bytes(None) is None


def test_validation_in_training_has_both_units(trained):
    tokeniser, corpus, run = trained
    targets = open_split(corpus, "val").slice(1, 512).tolist()
    assert tokeniser.eot in targets
    *_, last = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    nats = last["val_loss"] * 512
    bits = nats / math.log(2) / bytes_of(tokeniser, targets)
    assert last["val_bits_per_byte"] == pytest.approx(bits, rel=1e-12)


def test_an_evaluation_has_both_units_and_adds_them_to_an_old_file(trained, monkeypatch, capsys):
    tokeniser, corpus, run = trained
    out = run / "x.json"
    given = [str(run), "--data", corpus, "--lengths=32,64", "--tokens=512", "--window=32"]
    given += ["--out", str(out), "--no-figures"]
    eval_extrapolation.main(given)
    assert "\nbits per byte\n" in capsys.readouterr().out
    results = read_results(out)
    size = bytes_of(tokeniser, open_split(corpus, "val").slice(1, 512).tolist())
    losses = {r.key[1:]: r for r in results.select(quantity="loss")}
    found = {r.key[1:]: r for r in results.select(quantity="bits_per_byte")}
    assert len(losses) == 4 and losses.keys() == found.keys()
    for key, bits in found.items():
        loss = losses[key]
        factor = 512 / size / math.log(2)
        assert bits.value == pytest.approx(loss.value * factor, rel=1e-12)
        assert bits.error == pytest.approx(loss.error * factor, rel=1e-12)
    old = json.loads(out.read_text())
    old["records"] = [r for r in old["records"] if r["quantity"] != "bits_per_byte"]
    files.write_json(out, files.seal({key: old[key] for key in (*HEAD, "records")}))
    monkeypatch.setattr(eval_extrapolation, "measure", None)  # nothing is measured again
    eval_extrapolation.main(given)
    again = {r.key: r.value for r in read_results(out).records}
    assert again == {r.key: r.value for r in results.records}


def test_a_table_of_the_paper_shows_bits_where_they_were_measured(tmp_path):
    """Older results, of which only the loss is known, are not missing for it."""
    for seed in SCALES["nano"].seeds_of("softmax"):
        made.curve(tmp_path, "softmax", seed, made.CURVES["softmax"])
    headline = all_tables("nano")["headline"]
    before = Evidence("nano", tmp_path).sheet(headline)
    assert "bits per byte (1x)" not in [title for _, title in before.columns]
    for seed in range(3):
        path = made.curve(tmp_path, "lssa", seed, made.CURVES["lssa"])
        record = made.record("bits_per_byte", 2.5 + seed / 10, length=128)
        found = json.loads(path.read_text())
        made.write(path, found | {"records": [*found["records"], record]})
    evidence = Evidence("nano", tmp_path)
    built = evidence.sheet(headline)
    assert built.columns[-1][1] == "bits per byte (1x)"
    by_key = {line.row.key: line for line in built.lines}
    assert by_key["lssa"].entries[-1].text == "2.600"
    assert by_key["softmax"].entries[-1].text == "" and not by_key["softmax"].missing
    figure = by_length(built)
    drawn = [line.get_xdata() for line in figure.axes[0].get_lines()]
    assert max(len(points) for points in drawn) == 5  # lengths, and no sixth number
