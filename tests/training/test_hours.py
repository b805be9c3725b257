"""Hours on a GPU: near what others published, dearer where more is done, measured where known."""

import json
from pathlib import Path

import pytest

from training import hours
from training.config import load_config
from training.estimate import planned_backends
from training.hours import DEVICES, attention_seconds, device_called, gpu_hours

ROOT = Path(__file__).parents[2]


def tokens_per_second(config: str, device: str, *changes: str) -> float:
    config = load_config(ROOT / f"configs/{config}.toml", ["--train.steps=100000", *changes])
    seconds = 3600 * gpu_hours(config, planned_backends(config, "cuda"), DEVICES[device])
    return config.train.steps * config.train.batch_tokens / seconds


# GPT-2 124M in bf16 with flash attention and torch.compile: build-nanogpt, and nanoGPT's issue 182.
@pytest.mark.parametrize("device, published", [("a100", 176_000), ("4090", 105_000)])
def test_the_estimate_is_within_a_tenth_of_published_speeds(device, published):
    found = tokens_per_second("gpt2-124m-softmax", device, "--eval.interval=100000")
    assert found == pytest.approx(published, rel=0.1)


def test_eager_lssar_takes_as_long_as_the_paper_measured():
    """250.32 ms for 4 x 1,024 tokens on an A100."""
    changes = ("--attention.backend=eager", "--train.compile=false", "--train.batch_tokens=4096")
    found = tokens_per_second("gpt2-124m-lssar", "a100", *changes, "--eval.interval=100000")
    assert found == pytest.approx(4096 / 0.25032, rel=0.1)


def test_longer_sequences_in_one_step_of_four_take_their_share():
    options = ("--train.micro_batch=4", "--eval.interval=100000")
    costs = [
        1 / tokens_per_second("single-lssar", "4090", *options, f"--train.{change}")
        for change in ("length=1024", "long_length=4096", "length=4096")
    ]
    assert costs[1] == pytest.approx(0.75 * costs[0] + 0.25 * costs[2], rel=1e-3)
    assert costs[1] > 1.01 * costs[0]


def test_more_work_takes_longer():
    speeds = [tokens_per_second(f"single-{name}", "4090") for name in ("softmax", "lssar")]
    speeds.append(tokens_per_second("single-lssar", "4090", "--attention.backend=eager"))
    assert speeds == sorted(speeds, reverse=True)
    order = ("h100", "a100", "4090", "3090")
    by_device = [tokens_per_second("single-lssar", device) for device in order]
    assert by_device == sorted(by_device, reverse=True)


@pytest.mark.parametrize(
    "name, key",
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
    ],
)
def test_a_device_is_known_by_what_the_driver_calls_it(name, key):
    assert device_called(name) is DEVICES[key]
    assert device_called("Radeon") is None


def test_times_of_gpu_check_take_the_place_of_the_estimate_on_its_gpu(tmp_path, monkeypatch):
    result = json.loads((ROOT / "results/cpu/attention.json").read_text())
    check = {"machine": {"name": "NVIDIA A100-SXM4-80GB"}}
    check["checks"] = [{"name": "odd"}, {"name": "benchmark: attention", "result": result}]
    (tmp_path / "gpu_check.json").write_text(json.dumps(check))
    m = load_config(ROOT / "configs/gpt2-124m-softmax.toml").model_config()
    places = [(m, m.attention, "sdpa", DEVICES[key], 1024, True) for key in ("a100", "h100")]
    before = [attention_seconds(*place) for place in places]
    monkeypatch.setattr(hours, "RESULTS", tmp_path)
    hours.measured.cache_clear()
    try:
        found = [attention_seconds(*place) for place in places]
        assert "measured by gpu_check" in hours.source(DEVICES["a100"])
        assert hours.source(DEVICES["h100"]) == "estimated, not run on hardware"
    finally:
        hours.measured.cache_clear()
    (ms,) = (
        r["value"]
        for r in result["records"]
        if (r["run"], r["quantity"], r["length"]) == ("Softmax", "forward_backward_ms", 1024)
        and r["variant"].startswith("sdpa")
    )
    # Measured for 1 x 12 heads x 1,024 rows; a layer of the model has 12 heads too.
    assert found == [pytest.approx(ms / 1000 / 1024), before[1]]
    assert found[0] != pytest.approx(before[0])
