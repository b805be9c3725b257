"""Files and names from strangers: nothing in them runs, nothing leaves its directory."""

import ast
import io
import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import hub_server
import numpy as np
import torch
from data_sets import REPOSITORY, run_prepare, write_set, write_shard
from eval_helpers import tiny_model, write_checkpoint

from data.shards import open_split
from lssar.errors import UserError
from model import GPT
from training.checkpoint import find, load_model, read_trainer
from training.config import load_config

from .attack import Told, attack
from .subjects import a_training

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal", "cloudpickle"}
FORBIDDEN_CALLS = {"os.system", "os.popen", "eval", "exec", "yaml.unsafe_load", "yaml.full_load"}
SHELLS = {"sh", "bash", "/bin/sh", "/bin/bash", "cmd"}


def sources() -> list[Path]:
    """Return every Python file of the repository that is not a test."""
    tracked = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.split()
    return [REPOSITORY / name for name in tracked if not name.startswith("tests/")]


def findings(path: Path) -> list[str]:
    """Calls and imports that can run what a file or a user says."""
    found, tree = [], ast.parse(path.read_text(encoding="utf-8"))
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    safe = {c.name for c in classes if "yaml.SafeLoader" in map(ast.unparse, c.bases)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] + [getattr(node, "module", None) or ""]
            found += [
                f"{path.name}: imports {n}" for n in names if n.split(".")[0] in FORBIDDEN_MODULES
            ]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        options = {k.arg: ast.unparse(k.value) for k in node.keywords}
        where = f"{path.name}:{node.lineno}: {name}"
        if name in FORBIDDEN_CALLS or name.endswith(".read_pickle"):
            found.append(where)
        if name == "torch.load" and options.get("weights_only") != "True":
            found.append(f"{where} without weights_only")
        if name == "yaml.load" and ast.unparse(node.args[-1]) not in {"yaml.SafeLoader", *safe}:
            found.append(f"{where} with an unsafe loader")
        if name in ("np.load", "numpy.load") and options.get("allow_pickle", "False") != "False":
            found.append(f"{where} with allow_pickle")
        if options.get("shell", "False") != "False":
            found.append(f"{where} with a shell")
        if name.startswith("subprocess.") and node.args and is_shell(node.args[0]):
            found.append(f"{where} starts a shell")
        if options.get("trust_remote_code", "False") != "False":
            found.append(f"{where} with trust_remote_code")
    return found


def is_shell(argument: ast.expr) -> bool:
    """Tell whether a command is a string, or a list that begins with a shell."""
    if isinstance(argument, ast.List) and argument.elts:
        first = argument.elts[0]
        return isinstance(first, ast.Constant) and first.value in SHELLS
    return isinstance(argument, ast.Constant | ast.JoinedStr)


@attack("security", "pickle, shells, eval: every source file searched", full=1, short=1)
def source_search(times: int, folder: Path) -> Told:
    files = sources()
    assert len(files) > 30
    found = [finding for path in files for finding in findings(path)]
    assert not found, "; ".join(found)
    probe = folder / "probe.py"  # the search itself must be able to find
    probe.write_text(
        "import pickle, os, subprocess, torch\ntorch.load('x')\nos.system('x')\neval('1')\n"
        "subprocess.run('ls ' + x, shell=True)\nsubprocess.run(['bash', '-c', x])\n"
    )
    assert len(findings(probe)) == 6, findings(probe)
    return Told(
        f"none in {len(files)} files: no pickle, no eval, no shell; torch.load only with "
        "weights_only",
        times=len(files),
    )


class Bomb:
    """Make a file when unpickled: a malicious checkpoint would do that, and more."""

    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


@attack("security", "malicious checkpoints: pickled code in every file of one", full=7, short=7)
def malicious_checkpoint(times: int, folder: Path) -> Told:
    trap = folder / "trap"
    pickle.loads(pickle.dumps(Bomb(trap)))
    assert trap.is_dir(), "the bomb does not even go off where it may"
    trap.rmdir()
    zipped = io.BytesIO()
    torch.save({"state": Bomb(trap)}, zipped)
    legacy = io.BytesIO()
    torch.save({"state": Bomb(trap)}, legacy, _use_new_zipfile_serialization=False)
    replaced = io.BytesIO()
    with zipfile.ZipFile(replaced, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"state": Bomb(trap)}))
        archive.writestr("archive/../../../escaped", b"x")
    bombs = {"zip": zipped, "legacy": legacy, "names": replaced}
    done = 0
    for name, bomb in bombs.items():
        for file in ("trainer.pt", "model.safetensors"):
            path = write_checkpoint(folder / f"{name}-{file}", tiny_model())
            description = json.loads((path / "model.json").read_text())
            del description["files"]  # the attacker's, who vouches for it
            (path / "model.json").write_text(json.dumps(description))
            (path / file).write_bytes(bomb.getvalue())
            reader = read_trainer if file == "trainer.pt" else load_model
            refuse(lambda reader=reader, path=path: reader(path), file)
            done += 1
    path = write_checkpoint(folder / "object", tiny_model())
    (path / "model.json").write_bytes(pickle.dumps(Bomb(trap)))
    refuse(lambda: load_model(path), "model.json")
    assert not trap.exists(), "code in a checkpoint was run"
    assert not list(folder.rglob("escaped")) and not (folder.parent / "escaped").exists()
    return Told("refused in one line that names the file; nothing in them was run", times=done + 1)


def refuse(call, words: str) -> None:
    try:
        call()
    except UserError as error:
        assert words in str(error) and "\n" not in str(error), str(error)
        return
    raise AssertionError(f"taken, where {words!r} should have been refused")


@attack("security", "what is shared is safetensors and JSON", full=1, short=1)
def shared_formats(times: int, folder: Path) -> Told:
    path = write_checkpoint(folder / "model", tiny_model())
    names = {p.name for p in path.iterdir()}
    assert names == {"model.safetensors", "model.json"}, names
    json.loads((path / "model.json").read_text())
    model, _ = load_model(path)  # all that evaluation reads: there is no trainer.pt
    assert isinstance(model, GPT)
    return Told("a checkpoint loads and evaluates from these two files alone", times=1)


@attack("security", "names that would leave their directory", full=18, short=18)
def escaping_names(times: int, folder: Path) -> Told:
    done = 0
    place = folder / "set"
    place.mkdir()
    tokens = np.arange(50, dtype=np.uint16)
    write_set(place, train=[tokens], val=[tokens])
    outside = folder / "x_train_000001.bin"
    write_shard(outside, tokens)
    shard = {"split": "train", "tokens": 50, "sha256": "0" * 64}
    manifest = {"tokeniser": "gpt2", "vocab_size": 50257, "eot": 50256, "documents": 0}
    names = ("../x_train_000001.bin", str(outside), "a/../../x_train_000001.bin", "..", "\0")
    for name in (*names, ".x_train_000001.bin", "x_train_000001.bin/..", "~/x_train_000001.bin"):
        (place / "manifest.json").write_text(
            json.dumps(manifest | {"shards": [shard | {"name": name}]})
        )
        refuse(lambda: open_split(place, "train"), "manifest.json")
        done += 1
    for name in ("..", ".", "../x", "/tmp/x", "a/b", "x/", "\0", "a\nb"):
        refuse(
            lambda name=name: load_config(
                "configs/nano-lssar.toml", [f"--log.name={json.dumps(name)}"]
            ),
            "log.name",
        )
        done += 1
    # The name in `latest` is a stranger's when the run is: it stays a name within checkpoints/.
    inside = write_checkpoint(folder / "run/checkpoints/step-00000007", tiny_model())
    write_checkpoint(folder / "step-00000009", tiny_model(seed=1))
    for target in ("../../step-00000009", str(folder / "step-00000009")):
        (folder / "run/checkpoints/latest").write_text(target)
        assert find(folder / "run") == inside, find(folder / "run")
        done += 1
    return Told("refused, or taken as a name within its directory", times=done)


@attack("security", "hubs that list names outside the set, or send other bytes than listed", full=2)
def hostile_hub(times: int, folder: Path) -> Told:
    write_shard(folder / "good.bin", [50256, 1, 2])
    write_shard(folder / "evil.bin", [50256, 1, 3])
    good, evil = ((folder / f"{n}.bin").read_bytes() for n in ("good", "evil"))
    names = ["fineweb_val_000000.bin", "fineweb_train_000001.bin"]
    files = dict.fromkeys([*names, "../../escaped_train_000002.bin", "a/b_train_000003.bin"], good)
    with hub_server.Hub({"kjj0/fineweb10B-gpt2": files}) as hub:
        done = download(hub, folder / "one", folder)
        assert done.returncode == 0, done.stderr
        assert {p.name for p in (folder / "one").iterdir()} == {*names, "manifest.json"}
        manifest = json.loads((folder / "one/manifest.json").read_text())
        assert manifest["settings"]["source"]["revision"] == hub_server.COMMIT
    assert not list(folder.rglob("escaped*")) and not list(folder.parent.glob("escaped*"))
    honest = hub_server._entry
    hub_server._entry = lambda name, data: honest(name, good)
    try:
        with hub_server.Hub({"kjj0/fineweb10B-gpt2": dict.fromkeys(names, evil)}) as hub:
            done = download(hub, folder / "two", folder)
    finally:
        hub_server._entry = honest
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert re.search(r"sha256|[Cc]onsistency|cannot fetch", done.stderr), done.stderr
    assert not (folder / "two/manifest.json").exists()
    return Told(
        "only plain shard names were fetched, of one commit that the manifest names; bytes with "
        "another sha256 were refused",
        times=2,
    )


def download(hub: hub_server.Hub, out: Path, home: Path):
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home / "home")}
    return run_prepare("download", "fineweb", "--out", out, env=environment)


@attack("security", "shell metacharacters in names and paths", full=2)
def shell_metacharacters(times: int, folder: Path) -> Told:
    subject = a_training()
    names = ("$(touch trap)", "; touch trap #", "`touch trap`", "| touch trap &")
    for name in names[:times]:
        done = subprocess.run(
            [sys.executable, str(REPOSITORY / "train.py"), *subject.arguments(folder / "runs"),
             f"--log.name={name}", "--train.steps=4"],
            cwd=folder, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert (folder / "runs" / name / "loss.png").exists()
    assert not list(folder.rglob("trap")), "a name was run"
    return Told("taken as plain names; nothing was run", times=times)
