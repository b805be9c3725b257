"""python benchmark.py train --preset 124m --attention softmax,lssar: cost of a training step.

One step is forward, backward, clip and AdamW on random tokens. All contestants take turns within
one process, so that a noisy machine is noisy for all; times are medians, memory is the peak of a
process of its own above what it had before the model. `--nanogpt DIR` adds the step of a nanoGPT
checkout, at the same shape and with its own optimiser settings.
"""

import importlib.util
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks import measure
from benchmarks.measure import Step
from errors import Parser, UserError, positive
from files import write_json
from model import GPT, PRESETS, preset


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--preset", default="nano", choices=tuple(PRESETS))
    parser.add_argument("--attention", default="softmax,lssar", help="mechanisms, by commas")
    parser.add_argument("--backend", default="auto", help="of attention.BACKENDS")
    parser.add_argument("--batch", type=positive, default=4)
    parser.add_argument("--length", type=positive, default=128)
    parser.add_argument("--rounds", type=positive, default=10)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--nanogpt", type=Path, help="a nanoGPT checkout to measure beside")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args(argv)
    if options.out:
        measure.check_writable(options.out)
    names = options.attention.split(",") + (["nanoGPT"] if options.nanogpt else [])

    device = measure.best_device()
    steps = {name: make_step(name, options) for name in names}
    seconds = measure.median_seconds(steps, device=device, rounds=options.rounds)
    memory = {
        name: measure.peak_megabytes(make_steps, name, options, device=device)[0]
        for name in tqdm(names, desc="memory")
    }
    tokens = options.batch * options.length
    rows = {
        name: {
            "milliseconds": 1000 * seconds[name],
            "tokens_per_s": tokens / seconds[name],
            "time_ratio": seconds[name] / seconds[names[0]],
            "peak_MB": memory[name],
        }
        for name in names
    }
    setting = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    setting |= measure.machine(device)
    print(
        f"{options.preset}, batch {options.batch} x {options.length} tokens, {device}, "
        f"{torch.get_num_threads()} threads, median of {options.rounds}"
    )
    print(f"{'':14}{'ms / step':>12}{'tokens/s':>12}{'time ratio':>12}{'peak MB':>12}")
    for name, row in rows.items():
        print(f"{name:14}" + "".join(f"{value:12,.2f}" for value in row.values()))
    if options.out:
        write_json(options.out, {"setting": setting, "steps": rows})
    return 0


def make_steps(name: str, options) -> list[Step]:
    return [make_step(name, options)]


def make_step(name: str, options) -> Step:
    device = measure.best_device()
    vocabulary = PRESETS[options.preset]["vocab_size"]
    with torch.random.fork_rng([0] if device == "cuda" else []):
        torch.manual_seed(0)
        if name == "nanoGPT":
            loss_of, parameters, optimiser = _nanogpt(options, device)
        else:
            loss_of, parameters, optimiser = _ours(name, options, device)
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


def _ours(name: str, options, device: str):
    model = GPT(preset(options.preset, name)).to(device).use_backend(options.backend)
    if options.compile:
        model.compile()
    optimiser = torch.optim.AdamW(model.parameter_groups(0.1), betas=(0.9, 0.95), fused=True)
    return model, list(model.parameters()), optimiser


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
