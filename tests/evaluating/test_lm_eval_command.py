"""lm-eval's own command on an export, on MMLU's questions as the harness itself brings them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="pip install -r requirements-downstream.txt")
pytest.importorskip("accelerate", reason="lm_eval's model `hf` needs it")

import lm_eval
from eval_helpers import tiny_model, write_checkpoint
from lm_eval.api.instance import Instance

import downstream
import export_hf
from evaluating.checkpoints import open_checkpoints
from evaluating.lm_eval_model import CheckpointLM
from evaluating.results import read_results
from lssar.errors import UserError
from lssar.lm_eval import LssarLM

ROOT = Path(__file__).parents[2]
PROMPTS = Path(lm_eval.__file__).parent / "tasks/mmlu/flan_cot_fewshot/_cot_prompts.json"
MAX_LENGTH = 512  # the longest choice has 421 bytes
ARGUMENTS = "pretrained={},trust_remote_code=True,add_bos_token=False,max_length=512"


def questions() -> list[dict]:
    """Read MMLU's worked examples of 57 subjects: question, four choices, the right one's place."""
    pattern = r"Q: ([^\n]+)\n\(A\) (.+?) \(B\) (.+?) \(C\) (.+?) \(D\) (.+?)\nA: .*?\(([A-D])\)\.\n"
    found = [
        {"question": question, "choices": choices, "answer": "ABCD".index(right)}
        for text in json.loads(PROMPTS.read_text(encoding="utf-8")).values()
        for question, *choices, right in re.findall(pattern, text + "\n")
    ]
    assert len(found) > 200
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm_eval") / "run"
    return write_checkpoint(folder, tiny_model("lssar"), tokeniser="bytes")


@pytest.fixture(scope="module")
def exported(run):
    export_hf.main([str(run), str(run.parent / "export")])
    return run.parent / "export"


def test_an_export_scores_every_choice_as_its_checkpoint_does(run, exported):
    texts = [(d["question"], f" {c}") for d in questions()[::12] for c in d["choices"]]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(texts)]
    (checkpoint,) = open_checkpoints([str(run)])
    ours = CheckpointLM(checkpoint, "cpu", MAX_LENGTH).loglikelihood(requests)
    options = {"trust_remote_code": True, "add_bos_token": False, "device": "cpu"}
    theirs = LssarLM(str(exported), max_length=MAX_LENGTH, batch_size=8, **options).loglikelihood(
        requests
    )
    assert len(ours) > 50
    for (one, greedy), (other, as_greedy) in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-4) and greedy == as_greedy


def test_a_run_is_no_pretrained_model():
    with pytest.raises(UserError, match="needs pretrained=FOLDER, and was given checkpoint=a"):
        LssarLM(checkpoint="a")


@pytest.mark.slow
@pytest.mark.parametrize("module, model", [("lm_eval", "hf"), ("lssar.lm_eval", "lssar")])
def test_the_command_gives_the_scores_of_downstream(run, exported, tmp_path, module, model):
    data = tmp_path / "mmlu.jsonl"
    data.write_text("".join(json.dumps(d) + "\n" for d in questions()), encoding="utf-8")
    metrics = [{"metric": name, "aggregation": "mean"} for name in ("acc", "acc_norm")]
    task = {
        "task": "mmlu_examples",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "question",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": metrics,
    }
    file = tmp_path / "mmlu_examples.yaml"
    file.write_text(json.dumps(task), encoding="utf-8")
    out = tmp_path / "ours.json"
    common = ["--device", "cpu", "--max-length", str(MAX_LENGTH)]
    downstream.main([str(run), "--tasks", str(file), "--out", str(out), *common])
    command = [sys.executable, "-m", module, "run", "--model", model, "--tasks", str(file)]
    command += ["--model_args", ARGUMENTS.format(exported), "--device", "cpu"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [*command, "--output_path", str(tmp_path / "theirs"), "--batch_size", "16"],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = (tmp_path / "theirs").rglob("results_*.json")
    theirs = json.loads(found.read_text(encoding="utf-8"))["results"]["mmlu_examples"]
    for record in read_results(out).records:
        assert theirs[f"{record.quantity},none"] == record.value
