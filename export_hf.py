"""python export_hf.py CKPT OUT

Makes a folder that Hugging Face transformers loads on a machine without this code:

    model = AutoModelForCausalLM.from_pretrained(OUT, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(OUT, trust_remote_code=True)
    print(tokenizer.decode(model.generate(**tokenizer("Once", return_tensors="pt"))[0]))

The folder holds safetensors weights, the configuration, the tokeniser (which begins a text with the
end-of-text token, as `generate.py` does), a model card and copies of the files of this repository
that compute the model. It generates the tokens that `generate.py` does. To publish it:

    hf auth login
    hf upload NAME/MODEL OUT
"""

import contextlib
import errno
import hashlib
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

from data.shards import describe_set
from data.tokeniser import ALPHABET, EOT_TEXT, Gpt2Tokeniser, Tokeniser
from evaluating.checkpoints import Checkpoint, model_label, open_checkpoints
from lssar.errors import UserError
from support.command import Parser, run
from support.files import lookup, write_text
from training.checkpoint import load_model
from training.run_log import RUN

ROOT = Path(__file__).parent
MODEL = "evaluating.hf_model"
MODEL_MODULE = "modeling_lssar"
KERNEL_MODULE = "lssar_cpu_source"
# Classes of the folder, by the names that transformers looks for: AutoConfig, AutoModel, ...
CLASSES = {"Config": "LssarConfig", "Model": "LssarModel", "ModelForCausalLM": "LssarForCausalLM"}
IMPORT = re.compile(r"^( *)from ([\w.]+) import (.+)$", re.MULTILINE)
CPU_SOURCE = 'SOURCE = Path(__file__).with_name("lssar_cpu.cpp")\n'
WRITE_SOURCE = f"""if not SOURCE.exists():
    from .{KERNEL_MODULE} import TEXTS

    for name, text in TEXTS.items():  # SOURCE is the last
        SOURCE.with_name(name).write_text(text)
"""


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("checkpoint", metavar="CKPT", help="run or checkpoint")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to make")
    return parser


def main(argv: list[str]) -> None:
    arguments = make_parser().parse_args(argv)
    (checkpoint,) = open_checkpoints([arguments.checkpoint])
    if checkpoint.config.documents:
        raise UserError(
            f"{checkpoint.path} was trained with data.document_mask = true, and packed documents "
            "cannot be cached by transformers; train without it to export"
        )
    if importlib.util.find_spec("transformers") is None:
        raise UserError("transformers is not installed; pip install -r requirements-downstream.txt")
    from evaluating.hf_model import MODEL as KNOWN

    if unknown := sorted(checkpoint.config.to_dict().keys() - KNOWN.keys()):
        settings = ", ".join(f"{key} = {getattr(checkpoint.config, key)}" for key in unknown)
        raise UserError(f"{checkpoint.path} has {settings}, which an exported model does not know")
    with new_folder(arguments.out) as folder:
        write_model(checkpoint, folder)
        write_tokeniser(checkpoint.tokeniser(), folder)
        write_card(checkpoint, folder)
        write_code(folder)
    print(f"{checkpoint.path} is in {arguments.out}")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to fill, which is renamed `out` in the end, so that `out` is whole or absent.

    The temporary folder has a name of its own, so that exports at the same time do not meet.
    """
    if out.name in ("", ".."):
        raise UserError(f"OUT is {str(out)!r}; give the name of a new folder")
    temporary = None
    try:
        if out.exists() and any(out.iterdir()):
            raise UserError(f"{out} is not empty; give a new folder")
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
        yield temporary
        allow_readers(temporary)
        temporary.rename(out)  # over an empty folder too, and over nothing else
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise UserError(f"{out} was filled by another process; give a new folder") from None
        raise UserError(f"cannot write {out}: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def allow_readers(folder: Path) -> None:
    """Give the folder and its files the modes of new ones; safetensors makes private files."""
    mask = os.umask(0)
    os.umask(mask)
    folder.chmod(0o777 & ~mask)
    for path in folder.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


def write_model(checkpoint: Checkpoint, out: Path) -> None:
    from safetensors import SafetensorError

    from evaluating.hf_model import LssarConfig, LssarForCausalLM

    described = checkpoint.config.to_dict()
    train_length = checkpoint.info.train_length
    eot = checkpoint.tokeniser().eot
    ends = {"bos_token_id": eot, "eos_token_id": eot, "pad_token_id": eot}
    config = LssarConfig(**described, train_length=train_length, **ends)
    config.auto_map = {f"Auto{kind}": f"{MODEL_MODULE}.{name}" for kind, name in CLASSES.items()}
    model = LssarForCausalLM(config)
    model.model.gpt = load_model(checkpoint.path)[0]
    model.tie_weights()
    model.generation_config.update(**ends, do_sample=False)
    try:
        model.save_pretrained(out)
    except SafetensorError as error:
        raise OSError(f"the weights: {error}") from None


def write_tokeniser(tokeniser: Tokeniser, out: Path) -> None:
    """Write a tokeniser with the same ids: byte-level BPE, without merges for bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    bpe = isinstance(tokeniser, Gpt2Tokeniser)
    ranks = tokeniser._bpe._mergeable_ranks if bpe else {bytes([b]): b for b in range(256)}
    spelled = {_spelling(token): rank for token, rank in ranks.items()}
    merges = [tuple(map(_spelling, pair)) for pair in _merges(ranks)]
    fast = Tokenizer(models.BPE(vocab=spelled, merges=merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=bpe)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(EOT_TEXT, special=True, normalized=False)])
    fast.post_processor = processors.TemplateProcessing(
        single=f"{EOT_TEXT} $A", special_tokens=[(EOT_TEXT, tokeniser.eot)]
    )
    options = dict.fromkeys(("bos_token", "eos_token", "pad_token"), EOT_TEXT)
    options |= {"padding_side": "left", "clean_up_tokenization_spaces": False}
    options["split_special_tokens"] = True  # the text "<|endoftext|>" is text
    PreTrainedTokenizerFast(tokenizer_object=fast, **options).save_pretrained(out)


def _spelling(token: bytes) -> str:
    return "".join(map(ALPHABET.get, token))


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the pair that each longer token is merged from, in the order of the merges."""
    merges = []
    for token in sorted((t for t in ranks if len(t) > 1), key=ranks.get):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
            first = pairs.index(min(pairs))
            parts[first : first + 2] = [parts[first] + parts[first + 1]]
        merges.append(tuple(parts))
    return merges


CARD = """---
library_name: transformers
license: mit
pipeline_tag: text-generation
tags:
- {config.attention.name}
- length-extrapolation
---

# {info.run}

A GPT-2 with {label} attention ({parameters:,} parameters: {config.layers} layers,
{config.heads} heads, width {config.width}), of the paper *Softplus Attention with Re-weighting
Boosts Length Extrapolation in Large Language Models*.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("NAME/MODEL", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("NAME/MODEL", trust_remote_code=True)
print(tokenizer.decode(model.generate(**tokenizer("Once", return_tensors="pt"))[0]))
```

Packed sequences are told apart by `position_ids` that start again at 0. A LoRA adapter needs its
targets named: `LoraConfig(target_modules=["qkv"], ...)`. No attention weights are returned.

## Training

| | |
|---|---|
{rows}

## Citation

```bibtex
@inproceedings{{gao2026softplus,
  title = {{Softplus Attention with Re-weighting Boosts Length Extrapolation in Large Language
           Models}},
  author = {{Gao, Bo and Spratling, Michael W. and Gionfrida, Letizia}},
  booktitle = {{International Conference on Machine Learning}},
  year = {{2026}},
  note = {{arXiv 2501.13428}}
}}
```

The weights were trained with an independent reimplementation.

## Publish

`hf upload NAME/MODEL .` in this folder, after `hf auth login`.
"""


def write_card(checkpoint: Checkpoint, out: Path) -> None:
    """Write README.md, which the hub shows: the model, its numbers, the command of its run."""
    info, config = checkpoint.info, checkpoint.config
    run = checkpoint.path.resolve().parents[1]  # of RUN/checkpoints/step-N
    trained = training_of(run)
    command = [without_folder(argument) for argument in lookup(run / RUN, "command") or []]
    tokens = info.step * trained.get("train", {}).get("batch_tokens", 0)
    settings = {k: v for k, v in config.to_dict()["attention"].items() if k != "name"}
    rows = {
        "checkpoint": f"step {info.step}",
        "data": data_of(trained.get("data", {}).get("directory")),
        "tokens": tokens and f"{tokens:,}",
        "trained at": f"length {info.train_length}, tokeniser {checkpoint.tokeniser().name}",
        "validation loss": info.val_loss and f"{info.val_loss:.4f} nats per token",
        "random numbers": None if info.seed is None else f"seed {info.seed}",
        "attention": ", ".join(f"{k} = {v}" for k, v in settings.items()),
        "layers": f"{', '.join(config.pattern)}; positions {config.positions}",
        "command": command and f"`python {shlex.join(command)}`",
        "revision": lookup(run / RUN, "revision"),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value)
    numbers = {"parameters": load_model(checkpoint.path)[0].parameter_count(), "rows": table}
    text = CARD.format(info=info, config=config, label=model_label(config), **numbers)
    write_text(out / "README.md", text)


def training_of(run: Path) -> dict:
    """Return the config of a run; empty where the run has none, or none that can be read."""
    try:
        return tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def data_of(directory: str | None) -> str | None:
    """Name a data set, and where its text comes from if it still lies there."""
    if directory is None:
        return None
    source = describe_set(directory)["source"]
    name = Path(directory).name
    return f"{name} ({source})" if source else name


def without_folder(argument: str) -> str:
    """Return an argument of a command, of whose path, if it is one of this machine, the name."""
    key, equals, value = argument.rpartition("=")
    path = Path(value)
    if path.is_absolute() or value.startswith(("~", "..")):
        value = path.name
    return f"{key}{equals}{value}"


def write_code(out: Path) -> None:
    """Copy the modules that the model needs, flat, so that they import each other."""
    needed = modules_of(MODEL)
    files = {}
    for module in needed:
        text = exported(_file(module).read_text(encoding="utf-8"), needed)
        if module == "lssar.cpu_build":
            text = text.replace(CPU_SOURCE, CPU_SOURCE + WRITE_SOURCE)
        files[f"{_flat(module)}.py"] = text
    about = '"""The C++ files of lssar/: transformers copies Python files only."""'
    sources = [*sorted(ROOT.glob("lssar/cpu_*.h")), ROOT / "lssar/lssar_cpu.cpp"]
    texts = {path.name: path.read_text(encoding="utf-8") for path in sources}
    files[f"{KERNEL_MODULE}.py"] = f"{about}\n\nTEXTS = {texts!r}\n"
    # torch knows an operator by its name in the whole process, and in its cache of compiled graphs.
    version = hashlib.sha256("".join(files.values()).encode()).hexdigest()[:12]
    for name, text in files.items():
        write_text(out / name, text.replace('"lssar::', f'"lssar_{version}::'))
    shutil.copy(ROOT / "LICENSE", out / "LICENSE")


def modules_of(module: str) -> list[str]:
    """List the module and every module of this repository that it imports, directly or not."""
    found = [module]
    for name in found:  # which grows
        for _, package, names in IMPORT.findall(_file(name).read_text(encoding="utf-8")):
            inside = (f"{package}.{part.strip()}" for part in names.split(","))
            found += [m for m in (package, *inside) if m not in found and _file(m).is_file()]
    return found


def _file(module: str) -> Path:
    return ROOT / f"{module.replace('.', '/')}.py"


def _flat(module: str) -> str:
    return MODEL_MODULE if module == MODEL else module.replace(".", "_")


def exported(text: str, modules: list[str]) -> str:
    """Return a module's source that imports `modules` from its own folder and needs no Triton."""

    def relative(match: re.Match) -> str:
        indent, package, names = match.groups()
        if package in modules:
            return f"{indent}from .{_flat(package)} import {names}"
        inside = [f"{package}.{name.strip()}" for name in names.split(",")]
        if not set(inside) <= set(modules):
            return match.group()
        # This is `from lssar import cpu`. transformers finds files by their `from .x import`.
        lines = ("from .{0} import __name__ as _", "from . import {0} as {1}")
        names = [(_flat(m), m.rpartition(".")[2]) for m in inside]
        return "\n".join(indent + line.format(*name) for name in names for line in lines)

    text = IMPORT.sub(relative, text)
    # transformers requires every package that is imported outside a `try`.
    guarded = r"\1try:\n\1    \2\n\1except ImportError:\n\1    raise"
    return re.sub(r"^( *)((?:import|from) triton\b.*)$", guarded, text, flags=re.MULTILINE)


if __name__ == "__main__":
    run(main)
