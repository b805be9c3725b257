"""Input that nobody would give on purpose: one line, never a traceback, never a hang."""

import argparse
import contextlib
import copy
import io
import json
import os
import resource
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from eval_helpers import tiny_model, write_checkpoint, write_tokens
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import attention_maps
import data.prepare
import eval_extrapolation
import generate
import passkey
import train
from data.far_tasks import ANSWER_TOKENS, make_prompt
from data.identity import check_data_unchanged
from data.pipeline import Piece, encode_pieces
from data.shards import HEADER_BYTES, header_bytes, open_split, verify
from data.tokeniser import TOKENISERS, get_tokeniser
from lssar import cpu_build
from lssar.errors import UserError
from lssar.folders import ensure_hub_cache
from model import GPT
from support.command import as_user_errors
from training.batch_plan import batch_plan
from training.checkpoint import Store, load_latest, load_model, read_trainer
from training.config import Config, load_config
from training.distributed import World, place, restarts, restore_rng
from training.optimiser import Optimiser
from training.run_log import machine, other_machine, plot_losses

from .attack import Told, attack
from .subjects import a_training

# For one input; what takes more counts as a hang or a leak. Seconds of computing, and of waiting.
SECONDS, WAITING, MEMORY = 20, 300, 3 * 2**30


class Hang(Exception):
    """Report an input that took longer than any of its size may."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    def late(*_):
        raise Hang(f"not finished after {SECONDS} s")

    previous = {n: signal.signal(n, late) for n in (signal.SIGALRM, signal.SIGPROF)}
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, hard))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WAITING)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        for number, handler in previous.items():
            signal.signal(number, handler)


def fuzz(times: int, strategy: st.SearchStrategy, feed: Callable) -> Told:
    """Feed so many inputs; UserError is an answer, as is success, and nothing else is."""
    counts = {"taken": 0, "refused in one line": 0}

    @seed(0)
    @given(strategy)
    @settings(
        max_examples=times,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        phases=[Phase.generate],
    )
    def one(value):
        quiet = io.StringIO()
        try:
            with (
                contextlib.redirect_stderr(quiet),
                contextlib.redirect_stdout(quiet),
                bounded(),
                as_user_errors(),
            ):
                feed(value)
            counts["taken"] += 1
        except UserError as error:
            assert str(error).strip() and "\n" not in str(error), repr(str(error))
            counts["refused in one line"] += 1
        except SystemExit as end:  # --help
            assert not end.code
            counts["taken"] += 1

    one()
    shown = ", ".join(f"{n} {what}" for what, n in counts.items())
    return Told(f"{shown}; no traceback, no hang", times=sum(counts.values()), figures=counts)


# --- strategies -----------------------------------------------------------------------------------

HOSTILE = (
    *("", "0", "-1", "1", "3", "nan", "inf", "-inf", "1e400", "1e-400", "true", "[]", "{}", "''"),
    *("9" * 25, "-" + "9" * 25, "9" * 5000, "1_000", "0x10", "1e3", "2024-01-31", "..", ".", "/"),
    *("../x", "a/b", "\0", "\n", "\udcff", "é", "a b", '"', "'", "[" * 5000, "{a=1}", "%s", "~"),
    *("--resume", "-h", "lssar", "bytes", "x" * 5000, "1,2", ",", "1,", "64,128", "0.5", "=", "²"),
)


def words() -> st.SearchStrategy[str]:
    return st.sampled_from(HOSTILE) | st.text(max_size=12) | st.integers().map(str)


# --- parsers --------------------------------------------------------------------------------------


@attack("input", "config overrides on the command line, fuzzed", full=3500, short=60)
def config_overrides(times: int, folder: Path) -> Told:
    keys = st.sampled_from([*Config().flat(), "train.step", "x.y", "train", ""])
    override = st.builds("--{}={}".format, keys, words()) | words()

    def feed(overrides: list[str]) -> None:
        config = load_config("configs/nano-lssar.toml", overrides)
        batch_plan(config, 1)
        config.model_config()
        text = config.to_toml()
        (folder / "x.toml").write_text(text, encoding="utf-8")
        assert load_config(folder / "x.toml") == config, "does not read back equal"
        inside = (folder / config.log.name).resolve()
        assert inside.parent == folder.resolve(), f"log.name = {config.log.name!r} leaves its place"

    return fuzz(times, st.lists(override, max_size=2), feed)


@attack("input", "config files, fuzzed", full=2500, short=40)
def config_files(times: int, folder: Path) -> Told:
    sound = Path("configs/gpt2-124m-lssar.toml").read_text()
    lines = st.builds("{} = {}".format, st.sampled_from(["lr", "base", "steps", "é"]), words())
    section = st.sampled_from(["[train]", "[[train]]", "[x]", "[train.lr]", "[model]"])
    text = st.lists(section | lines | words(), max_size=5).map("\n".join)
    mixed = st.tuples(text, st.integers(0, len(sound))).map(
        lambda t: sound[: t[1]] + t[0] + sound[t[1] :]
    )
    content = (text | mixed).map(lambda t: t.encode(errors="surrogateescape"))

    def feed(data: bytes) -> None:
        (folder / "x.toml").write_bytes(data)
        load_config(folder / "x.toml")

    return fuzz(times, content | st.binary(max_size=80), feed)


@attack("input", "the command lines of six scripts, fuzzed", full=300, short=4)
def command_lines(times: int, folder: Path) -> Told:
    model = str(write_checkpoint(folder / "model", tiny_model(layers=1, width=8)))
    tokens = str(write_tokens(folder / "tokens", 1200))
    (folder / "a.txt").write_text("some text " * 200)
    out = str(folder / "x.json")
    small = ["--lengths=16,32", "--tokens=64"]
    commands = {
        "train.py": (train, ["configs/nano-lssar.toml", "--dry-run"]),
        "prepare.py": (data.prepare, ["text", str(folder / "a.txt"), "--tokeniser=bytes"]),
        "eval_extrapolation.py": (eval_extrapolation, [model, "--data", tokens, *small]),
        "passkey.py": (passkey, [model, "--lengths=400", "--trials=1"]),
        "generate.py": (generate, [model, "--tokens=2"]),
        "attention_maps.py": (attention_maps, [model, "--text=abcdef"]),
    }
    options = {name: known_options(module) for name, (module, _) in commands.items()}

    def feed(case: tuple[str, list[tuple[str, str]], bool]) -> None:
        name, extra, reset = case
        module, argv = commands[name]
        for file in folder.glob("x*"):
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        argv = [*argv, *([] if name in ("train.py", "generate.py") else ["--out", out])]
        for option, value in extra:
            value = value[:200] if option == "--text" else value  # a map has its square of cells
            argv.append(f"{option}={value}" if option.startswith("--") else value)
        module.main(argv[1:] if reset else argv)

    cases = st.sampled_from(sorted(commands)).flatmap(
        lambda name: st.tuples(
            st.just(name),
            st.lists(st.tuples(st.sampled_from(options[name]), words()), max_size=3),
            st.integers(0, 9).map(lambda n: n == 0),
        )
    )
    with contextlib.chdir(folder_with_configs(folder)):
        return fuzz(times, cases, feed)


def known_options(module) -> list[str]:
    """Return what a script's own help lists, an unknown option, and a bare word."""
    found: list[str] = []
    original = argparse.ArgumentParser.add_argument

    def noted(self, *names, **options):
        found.extend(n for n in names if n.startswith("--") and options.get("action") is None)
        return original(self, *names, **options)

    argparse.ArgumentParser.add_argument = noted
    try:
        with contextlib.suppress(UserError, SystemExit), contextlib.redirect_stdout(io.StringIO()):
            module.main(["--help"])
    finally:
        argparse.ArgumentParser.add_argument = original
    # How long a user wants to wait, and on what, is no mistake.
    long = {"--trials", "--tokens", "--device", "--workers", "--out", "--world-size"}
    return [*sorted(set(found) - long), "--unknown", "word"]


def folder_with_configs(folder: Path) -> Path:
    """Make a folder in which a fuzzed relative path can do no harm."""
    place = folder / "cwd"
    place.mkdir()
    (place / "configs").symlink_to(Path("configs").resolve())
    return place


@attack("input", "environment variables, fuzzed", full=1500, short=60)
def environment(times: int, folder: Path) -> Told:
    """Attack the variables of torchrun, of the compiler, and of where things are kept."""
    numbers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
    places = ("LSSAR_CACHE", "XDG_CACHE_HOME", "HOME", "HF_HOME")
    small = st.integers(-1, 4).map(str) | words()
    # As root, another path could be made anywhere.
    relative = words().map(lambda text: text.lstrip("/")) | st.sampled_from(["/", "/dev/null/x"])
    values = st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(numbers, small) | dict.fromkeys(places, relative) | {"CXX": words()},
    )
    inside = folder / "a/b/c"
    inside.mkdir(parents=True)

    def feed(found: dict[str, str]) -> None:
        for name in (*numbers, *places, "CXX"):
            os.environ.pop(name, None)
        os.environ.update({name: text for name, text in found.items() if "\0" not in text})
        chosen = place()
        assert 0 <= chosen.rank < chosen.world_size and chosen.local_rank < chosen.world_size
        assert restarts() >= 0
        ensure_hub_cache()
        try:
            cpu_build._cache_folder()
            cpu_build._compiler(os.environ.get("CXX", ""))
        except (OSError, cpu_build.Unavailable) as error:  # another folder, or another backend
            raise UserError(str(error).replace("\n", " ")) from None

    before = dict(os.environ)
    try:
        with contextlib.chdir(inside), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fuzz(times, values, feed)
    finally:
        os.environ.clear()
        os.environ.update(before)


@attack("input", "names and labels in figures, fuzzed", full=60, short=4)
def figures(times: int, folder: Path) -> Told:
    signs = st.sampled_from([*"$_^{}\\%#&~中\udcff", "\\frac{"])
    names = st.lists(signs | st.text(max_size=4), max_size=6).map("".join)

    def feed(name: str) -> None:
        plot_losses([{"step": 1, "loss": 2.0}], folder / "x.png", name)

    return fuzz(times, names, feed)


# --- readers --------------------------------------------------------------------------------------


@attack("input", "shard files, fuzzed", full=1500, short=40)
def shard_reader(times: int, folder: Path) -> Told:
    header = st.builds(header_bytes, st.integers(-(2**31), 2**31 - 1))
    numbers = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=256, max_size=256)
    any_header = numbers.map(lambda n: np.array(n, "<i4").tobytes())
    body = st.binary(max_size=300)
    sound = body.map(lambda b: header_bytes(len(b) // 2) + b[: len(b) // 2 * 2])
    content = st.one_of(
        body,
        sound,
        st.tuples(header | any_header, body).map(b"".join),
        st.just(bytes(HEADER_BYTES)),
    )
    names = st.sampled_from(
        ["x_train_000000.bin", "x_val_000000.bin", "x_train_1.bin", "manifest.json"]
    )
    files = st.dictionaries(names, content, max_size=3)

    def feed(found: dict[str, bytes]) -> None:
        for path in folder.iterdir():
            path.unlink()
        for name, value in found.items():
            (folder / name).write_bytes(value)
        tokens = open_split(folder, "train", vocab_size=50304)
        assert len(tokens.slice(0, tokens.total_tokens)) == tokens.total_tokens
        verify(folder)

    return fuzz(times, files, feed)


@attack("input", "checkpoint files, fuzzed", full=1500, short=40)
def checkpoint_reader(times: int, folder: Path) -> Told:
    model = tiny_model(layers=1, width=8)
    path = write_checkpoint(folder / "model", model)
    description = json.loads((path / "model.json").read_text())
    del description["files"]  # nothing vouches for what an attacker wrote
    weights = (path / "model.safetensors").read_bytes()
    value = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | words(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
        max_leaves=4,
    )
    sizes = st.sampled_from([0, -1, 2, 2**31, 2**40, 2**63, 10**30, 1.5, True, "8"])
    places = [(part, key) for part in ("model", "info") for key in description[part]]
    places += [
        ("model",),
        ("info",),
        ("meaning",),
        ("files",),
        ("model", "attention", "p"),
        ("new",),
    ]
    places += [("model", "attention", "name"), ("model", "attention", "window"), ("model", "new")]
    edits = st.lists(st.tuples(st.sampled_from(places), value | sizes), min_size=1, max_size=2)
    bits = st.integers(0, 8 * len(weights) - 1).map(lambda n: flipped(weights, n))
    cut = st.integers(0, len(weights)).map(lambda n: weights[:n])
    files = st.tuples(
        edits.map(lambda e: edited(description, e)) | st.binary(max_size=40),
        st.just(weights) | bits | cut | st.binary(max_size=40),
        st.binary(max_size=60),
    )

    def feed(found: tuple[bytes, bytes, bytes]) -> None:
        names = ("model.json", "model.safetensors", "trainer.pt")
        for name, content in zip(names, found, strict=True):
            (path / name).write_bytes(content)
        with contextlib.suppress(UserError):
            read_trainer(path)
        loaded, info = load_model(path)
        assert isinstance(loaded, GPT) and info.step >= 0

    return fuzz(times, files, feed)


@attack("input", "trainer states with wrong things in sound archives, fuzzed", full=800, short=30)
def trainer_state(times: int, folder: Path) -> Told:
    """Read everything that a resumed run takes from a state, without the training."""
    subject, world = a_training(), World(0, 1, torch.device("cpu"))
    file, *overrides = subject.arguments(folder)
    config = load_config(file, overrides)
    latest = Store(subject.whole).candidates()[0]
    path = Path(shutil.copytree(latest, folder / "nano-lssar/checkpoints" / latest.name))
    sound = read_trainer(path)
    places = list(places_in(sound))
    description = json.loads((path / "model.json").read_text())
    del description["files"]  # an attacker's own
    (path / "model.json").write_text(json.dumps(description))
    data = sound["data"]
    tensors = st.sampled_from([torch.zeros(3), torch.zeros(0), torch.ones(2, 2, dtype=torch.uint8)])
    value = st.none() | st.booleans() | st.integers() | st.floats() | words() | tensors
    value |= st.lists(value, max_size=2) | st.dictionaries(st.text(max_size=3), value, max_size=2)
    edit = st.tuples(st.sampled_from(places), st.sampled_from(["replace", "remove"]), value)

    def feed(edits: list) -> None:
        state = copy.deepcopy(sound)
        for where, how, what in edits:
            with contextlib.suppress(KeyError, IndexError, TypeError):  # gone with another edit
                spoil(state, where, how, what)
        torch.save(state, path / "trainer.pt")
        store = Store(config.run_directory)
        model, progress, found = load_latest(config, store)
        optimiser = Optimiser(model, config.train)
        moments = found["optimiser"]["state"]
        optimiser.load_state_dict({**optimiser.state_dict(), "state": moments})
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimiser.step(torch.zeros((), dtype=torch.bool))
        restore_rng(found["rng"], world)
        check_data_unchanged(found["data"], data, subject.corpus, False)
        other_machine(found["machine"], machine(world))
        store.repair(path, progress, 2)

    return fuzz(times, st.lists(edit, min_size=1, max_size=2), feed)


def places_in(value: object, place: tuple = ()) -> Iterator[tuple]:
    """Yield the keys to every part of a nested value."""
    parts = value.items() if isinstance(value, dict) else ()
    parts = enumerate(value) if isinstance(value, list) else parts
    for key, part in parts:
        yield (*place, key)
        yield from places_in(part, (*place, key))


def spoil(state: dict, place: tuple, how: str, value: object) -> None:
    *parents, key = place
    for parent in parents:
        state = state[parent]
    if how == "remove":
        del state[key]
    else:
        state[key] = value


def flipped(content: bytes, bit: int) -> bytes:
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def edited(description: dict, edits: list[tuple[tuple[str, ...], object]]) -> bytes:
    copy = json.loads(json.dumps(description))
    for (*parents, key), value in edits:
        place = copy
        for parent in parents:
            place = place[parent] if isinstance(place.get(parent), dict) else {}
        place[key] = value
    return json.dumps(copy).encode()


@attack("input", "passkey prompts of any length, trial and seed", full=600, short=30)
def passkey_builder(times: int, folder: Path) -> Told:
    numbers = st.integers(-5, 3000) | st.sampled_from([2**31, 2**63, 2**64, 10**30, -(2**63)])
    cases = st.tuples(st.sampled_from(sorted(TOKENISERS)), numbers, st.integers(0, 10**6), numbers)

    def feed(case: tuple[str, int, int, int]) -> None:
        name, length, trial, number = case
        tokeniser = get_tokeniser(name)
        prompt = make_prompt(tokeniser, length, trial, number)
        assert len(prompt.tokens) == length - ANSWER_TOKENS
        assert f"pass key is {prompt.key}." in tokeniser.decode(prompt.tokens)

    return fuzz(times, cases, feed)


@attack("input", "tokenisers: any Unicode there and back, whole and in pieces", full=800, short=30)
def tokeniser_round_trip(times: int, folder: Path) -> Told:
    letters = st.characters() | st.sampled_from("\ud800\udfff\ufeff\u2028\0é中😀 \n\t\x1c")
    pieces = st.text(letters, max_size=60) | st.sampled_from(["<|endoftext|>", " " * 3000 + "x"])

    def feed(text: str) -> None:
        expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        for name in TOKENISERS:
            tokeniser = get_tokeniser(name)
            ids = tokeniser.encode(text)
            assert tokeniser.decode(ids) == expected, f"{name}: {text!r}"
            assert tokeniser.eot not in ids
            streamed = "".join(generate.text_pieces(tokeniser, ids.tolist()))
            assert streamed == expected, f"{name}, streamed: {text!r}"
            tokens = encode_pieces(name, [Piece(text)]).tokens
            assert tokens[0] == tokeniser.eot and np.array_equal(tokens[1:], ids), name

    return fuzz(times, st.lists(pieces, max_size=4).map("".join), feed)
