"""python examples/convert_llama.py results/examples/convert_llama.json

Tests whether a pretrained softmax model survives the switch to LSSAR, and in how many steps.

Trains a small byte-level Llama with SDPA on the standard library's sources (two minutes on one
core), then replaces its attention by LSSAR, by softmax of cosines, or by nothing, the control, and
trains on. Loss on held-out files at the training length while it learns, and at 1 to 16 times that
length before and after. Three seeds; the same command continues after an interruption. The figure
is beside the JSON. Needs transformers and matplotlib.
"""

import argparse
import json
import math
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path
from typing import NoReturn

sys.path.append(str(Path(__file__).parents[1]))  # a clone in which lssar is not installed

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import lssar.hf  # noqa: F401 - registers the mechanisms by name

LENGTH = 128
BATCH = 16
SIZE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
PEAK = 3e-3  # highest learning rate before the switch
TUNING = 1e-3  # learning rate after it
WARM = 10  # steps of warm-up after it
SWITCHES = {"sdpa": "softmax (as it was)", "lssar": "LSSAR", "cos-softmax": "softmax of cosines"}
LOOKS = {"sdpa": ("#D55E00", "s"), "lssar": ("#0072B2", "o"), "cos-softmax": ("#808000", "p")}


def whole(text: str) -> int:
    """Parse an option that is a whole number from 1 to a million."""
    if not text.isdecimal() or not 1 <= float(text) <= 1e6:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from 1 to 1000000")
    return int(text)


def refuse(why: str) -> NoReturn:
    """End with one line and exit code 2."""
    print(f"error: {why}", file=sys.stderr)
    sys.exit(2)


def options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[1])
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--seeds", type=whole, default=3)
    parser.add_argument("--steps", type=whole, default=600, help="of pretraining; %(default)s")
    parser.add_argument("--tuning", type=whole, default=300, help="most steps after; %(default)s")
    parser.add_argument("--tokens", type=whole, default=65536, help="held-out bytes; %(default)s")
    given = parser.parse_args(argv)
    if given.out.suffix != ".json" or given.tokens % 2048:
        refuse("OUT must end in .json, and --tokens must be a multiple of 2048")
    return given


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of the standard library's sources: to train on, and one in ten files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "_bundled"}
    found = [path.relative_to(root) for path in root.rglob("*.py")]
    names = sorted(p.as_posix() for p in found if not skipped.intersection(p.parts))
    names.sort(key=number_of)  # no topic comes first
    training = [name for name in names if number_of(name) % 10]
    held_out = [name for name in names if number_of(name) % 10 == 0]
    return joined(root, training), joined(root, held_out)


def number_of(name: str) -> int:
    """Return a number that depends on a file's name alone."""
    return zlib.crc32(name.encode())


def joined(root: Path, names: list[str]) -> torch.Tensor:
    """Return the bytes of files, one after another with a zero between them."""
    text = b"\0".join((root / name).read_bytes() for name in names)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def loss_of(model, inputs, targets) -> torch.Tensor:
    """Return the mean loss of a batch."""
    logits = model(inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(model, text, rates: list[float], seed: int):
    """Train with AdamW, one step for each learning rate; yield the number of finished steps."""
    draw = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    model.train()
    for step, rate in enumerate(rates):
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=draw)
        tokens = text[starts + torch.arange(LENGTH + 1)].long()
        loss = loss_of(model, tokens[:, :-1], tokens[:, 1:])
        optimiser.param_groups[0]["lr"] = rate
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        yield step + 1


@torch.inference_mode()
def loss_at(model, text, length: int, count: int) -> float:
    """Return the mean over `count` bytes in sequences of a length that do not overlap."""
    model.eval()
    inputs, targets = (text[i : i + count].view(-1, length).long() for i in (0, 1))
    total = 0.0
    for x, y in zip(inputs.split(2048 // length), targets.split(2048 // length), strict=True):
        total += loss_of(model, x, y).item() * y.numel()
    return total / count


def measure(seed: int, settings: dict) -> list[dict]:
    """Measure every number of one seed, as records."""
    training, held_out = texts()
    steps, tuning, count = (settings[key] for key in ("steps", "tuning", "tokens"))
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SIZE, attn_implementation="sdpa"))
    falling = [0.55 + 0.45 * math.cos(math.pi * step / steps) for step in range(steps)]
    cosine = [PEAK * min((step + 1) * 6 / steps, falling[step]) for step in range(steps)]
    constant = [TUNING * min(1, (step + 1) / WARM) for step in range(tuning[-1])]
    for step in train(model, training, cosine, seed):
        if step % 100 == 0:
            print(f"seed {seed}, step {step} of {steps}", file=sys.stderr)
    pretrained = {name: value.clone() for name, value in model.state_dict().items()}
    records = []

    def record(name: str, step: int, length: int) -> None:
        value = loss_at(model, held_out, length, count)
        variant = f"{name}, {step} steps"
        records.append(
            {
                "quantity": "loss",
                "run": f"llama-s{seed}",
                "value": value,
                "variant": variant,
                "length": length,
                "tokens": count,
                "details": {"attention": name, "steps": step},
                "command": settings["command"],
                "revision": settings["revision"],
            }
        )
        print(f"seed {seed}, {variant}, length {length}: {value:.4f}", flush=True)

    for name in SWITCHES:
        model.load_state_dict(pretrained)
        model.set_attn_implementation(name)
        for length in settings["lengths"]:
            record(name, 0, length)
        for step in train(model, training, constant, seed + 1000):
            if step in tuning:
                for length in settings["lengths"] if step == tuning[-1] else [LENGTH]:
                    record(name, step, length)
    return records


def draw(results: dict, file: Path) -> None:
    """Draw the loss at the training length by steps, and by length before and after."""
    settings = results["settings"]
    lengths = settings["lengths"]
    steps = [0, *settings["tuning"]]

    def line(axes, name, x, points, **look):
        records = [((r["variant"], r["length"]), r["value"]) for r in results["records"]]
        found = [[value for place, value in records if place == point] for point in points]
        y = [sum(values) / len(values) for values in found]
        colour, marker = LOOKS[name]
        axes.plot(x, y, color=colour, marker=marker, markersize=4, **look)
        low = [min(values) for values in found]
        high = [max(values) for values in found]
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)

    plt.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.8), layout="constrained")
    for name, label in SWITCHES.items():
        places = [(f"{name}, {step} steps", LENGTH) for step in steps]
        line(left, name, steps, places, label=label)
        for step, dash in ((0, ":"), (steps[-1], "-")):
            places = [(f"{name}, {step} steps", n) for n in lengths]
            line(right, name, lengths, places, linestyle=dash)
    left.set_xscale("symlog", linthresh=1)
    left.set_xticks(steps, [str(step) for step in steps])
    left.set(xlabel="steps after the switch", ylabel=f"held-out loss at {LENGTH} (nats per byte)")
    right.set_xscale("log", base=2)
    right.set_xticks(lengths, [f"{n // LENGTH}x" for n in lengths])
    after = f"dotted: at the switch, solid: {steps[-1]} steps later"
    right.set(xlabel=f"length ({after})", ylabel="held-out loss (nats per byte)")
    left.legend(frameon=False, title="attention after the switch")
    figure.savefig(file, dpi=200)
    plt.close(figure)


def revision() -> str:
    """Return the commit of this file, with + if tracked files have changed; or "unknown"."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    head = git("rev-parse", "HEAD")
    if not head:
        return "unknown"
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":!/results")
    return f"{head}+" if changed else head


def main(argv: list[str]) -> dict:
    given = options(argv)
    settings = {"steps": given.steps, "tokens": given.tokens}
    settings["tuning"] = [n for n in (1, 3, 10, 30, 100) if n < given.tuning] + [given.tuning]
    settings["lengths"] = [LENGTH * 2**i for i in range(5)]
    results = {"kind": "conversion", "settings": settings, "runs": {}, "records": []}
    results["about"] = {"python": sys.version.split()[0], "torch": torch.__version__}
    if given.out.exists():
        results = json.loads(given.out.read_text())
        if results["settings"] != settings:
            refuse(f"{given.out} was made with {results['settings']}; give another OUT")
    stamp = {"command": f"python examples/convert_llama.py {given.out}", "revision": revision()}
    for seed in range(given.seeds):
        run = f"llama-s{seed}"
        if run not in results["runs"]:
            results["records"] += measure(seed, settings | stamp)
            results["runs"][run] = {"run": run, "seed": seed, "train_length": LENGTH, "model": SIZE}
            given.out.parent.mkdir(parents=True, exist_ok=True)
            partial = given.out.with_suffix(".tmp")
            partial.write_text(json.dumps(results, indent=1))
            partial.replace(given.out)
    draw(results, given.out.with_suffix(".png"))
    return results


if __name__ == "__main__":
    main(sys.argv[1:])
