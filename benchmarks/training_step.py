"""The cost of a training step: `python benchmark.py train`.

One step is forward, backward, clip and AdamW on random tokens. All contestants take turns within
one process; times are medians, memory is the peak of a separate process above what it had before
the model. nanoGPT's step, from a checkout, is at the same shape with its own optimiser settings.
"""

import importlib.util
import statistics
from argparse import Namespace

import torch
from tqdm import tqdm

from benchmarks import measure, study_report
from benchmarks.measure import Step
from evaluating.results import Record
from lssar.errors import UserError
from model import GPT, PRESETS, preset

NANOGPT = "nanoGPT"


def main(options: Namespace) -> None:
    options.device = measure.best_device()
    preset(options.preset)  # raises for an unknown one
    results = measure.open_results(options)
    names = options.attention + ([NANOGPT] if options.nanogpt else [])
    steps = {name: make_step(name, options) for name in names}
    seconds = measure.round_seconds(steps, device=options.device, rounds=options.rounds)
    records = []
    for name in tqdm(names, desc="memory", leave=False, disable=None):
        (peak,) = measure.peak_megabytes(make_steps, name, options, device=options.device)
        time, first = (statistics.median(seconds[n]) for n in (name, names[0]))
        key = {"variant": options.preset, "length": options.length}
        rounds = {"rounds": [1000 * t for t in seconds[name]]}
        records += [
            Record("step_ms", name, 1000 * time, **key, details=rounds),
            Record("tokens_per_s", name, options.batch * options.length / time, **key),
            Record("step_ratio", name, time / first, **key),
            Record("step_MB", name, peak, **key),
        ]
    print(
        f"{options.preset}, batch {options.batch} x {options.length} tokens, {options.device}, "
        f"{torch.get_num_threads()} threads, median of {options.rounds}; ratios to {names[0]}"
    )
    print(study_report.text(records, []))
    if results:
        measure.write(results, {name: {"run": name} for name in names}, records)
        print(f"written: {options.out}")


def make_steps(name: str, options: Namespace) -> list[Step]:
    return [make_step(name, options)]


def make_step(name: str, options: Namespace) -> Step:
    with torch.random.fork_rng([0] if options.device == "cuda" else []):
        torch.manual_seed(0)
        return _step(name, options)


def _step(name: str, options: Namespace) -> Step:
    device = options.device
    if name == NANOGPT:
        loss_of, parameters, optimiser = _nanogpt(options, device)
    else:
        model = GPT(preset(options.preset, name)).to(device).use_backend(options.backend)
        if options.compile:
            model.compile()
        loss_of, parameters = model, list(model.parameters())
        optimiser = torch.optim.AdamW(model.parameter_groups(0.1), betas=(0.9, 0.95), fused=True)
    vocabulary = PRESETS[options.preset]["vocab_size"]
    tokens = torch.randint(vocabulary, (options.batch, options.length + 1), device=device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=options.bf16):
            loss = loss_of(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return step


def _nanogpt(options, device: str):
    """Loss function, parameters and optimiser of a nanoGPT checkout at the preset's shape."""
    file = options.nanogpt / "model.py"
    if not file.is_file():
        raise UserError(f"--nanogpt {options.nanogpt}: no model.py there; give a nanoGPT checkout")
    spec = importlib.util.spec_from_file_location("nanogpt_model", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shape = PRESETS[options.preset]
    model = module.GPT(
        module.GPTConfig(
            block_size=options.length,
            vocab_size=shape["vocab_rows"],
            n_layer=shape["layers"],
            n_head=shape["heads"],
            n_embd=shape["width"],
            dropout=0.0,
            bias=True,
        )
    ).to(device)
    optimiser = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device)
    compiled = torch.compile(model) if options.compile else model
    return (lambda x, y: compiled(x, y)[1]), list(model.parameters()), optimiser
