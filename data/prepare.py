"""python data/prepare.py SOURCE --out DIR

Turns text into verified token shards.

Sources:
  fineweb      HuggingFaceFW/fineweb from the hub, or --from-files 'x/*.parquet'
  fineweb-edu  HuggingFaceFW/fineweb-edu, likewise
  text         your own files or folders of them: any UTF-8 text, .jsonl and .parquet, also .gz
  stdlib       the Python standard library's sources: no network, a few seconds
  sources      the same and those of the installed torch: 58 MB
  passkey      passkey prompts with their answers, to learn retrieval from: no network either
  mqar, flipflop, copy
               sequences of --length tokens whose answers stand at a known distance, for audit.py
Others:
  download     ready-made llm.c shards of fineweb or fineweb-edu from the hub, checked
  verify DIR   re-read every byte of a set and compare with its manifest

An interrupted preparation continues when the same command is run again, and ends with the same
bytes. Shard 0 is validation: of the hub's text the beginning, of your own one document in twenty
from all over it, in random order (a file of more than an 800th of the text is drawn in parts).
"""

import argparse
import contextlib
import itertools
import os
import sys
import time
from pathlib import Path

if not __package__:  # run as a script: the repository, not this folder, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tqdm import tqdm

from data.download import READY_MADE, download, pinned_revision
from data.far_tasks import TASKS, PasskeySource, TaskSource
from data.own_text import Sample, TextSource, find_parquet, find_text
from data.pipeline import chunks, encoded
from data.shards import MANIFEST, MAX_SHARD_TOKENS, describe_set, verify
from data.sources import HUB, HubSource, PythonSource
from data.tokeniser import get_tokeniser
from data.writer import ShardWriter, forget_progress, recorded_settings, refuse_other_settings
from lssar.errors import UserError, did_you_mean
from support.command import MOST_PROCESSES, Parser, positive, run, seed_number, whole
from support.files import locked

GENERATED = ("stdlib", "sources", "passkey", *TASKS)  # bytes, with a split of their own
COMMANDS = (*HUB, "text", *GENERATED, "download", "verify")
# The standard library that the published numbers were trained and evaluated on.
PUBLISHED_SOURCE = "Python 3.11.7 standard library"
PUBLISHED_TOKENS_SHA256 = "0b73c456355c04c099cbbf61066ffdd2f9245230ef8dfc89a6991190ef76bf09"
MOST_LISTED = 20
SECONDS_BETWEEN_RECORDS = 5.0  # of work, which a kill can cost; each record syncs the disk


def prepare(source, arguments: argparse.Namespace) -> None:
    """Write the source's shards to --out, continuing if that was interrupted."""
    out = arguments.out
    tokeniser = get_tokeniser(arguments.tokeniser)
    kept = ("tokeniser", "shard_tokens", "val_tokens", "max_tokens")
    settings = {key: getattr(arguments, key) for key in kept} | {"source": source.description}
    with locked(out):
        refuse_other_settings(out, recorded_settings(out), settings)
        if (out / MANIFEST).exists():
            forget_progress(out)
            print(f"{out} is already complete")
            return
        writer = ShardWriter(
            out,
            source.prefix,
            tokeniser,
            settings,
            arguments.shard_tokens,
            seed=getattr(source, "seed", None),
        )
        with contextlib.closing(writer):
            left_out = {path: (0, why) for path, why in arguments.left_out.items()}
            left_out |= _fill(writer, source, arguments.workers)
            report_left_out(left_out)
            _refuse_too_little(writer)
            listed = [{"file": p.name, "lines": n, "what": w} for p, (n, w) in left_out.items()]
            writer.finish(skipped=listed)
    files = ""
    if hasattr(source, "files"):
        count = sum(left_out.get(path, (1, ""))[0] > 0 for path in source.files)
        files = f"{count:,} file{'s' * (count != 1)}, "
    tokens = "{train:,} training and {val:,} validation tokens".format(**writer.totals)
    shards = f"{len(writer.shards)} shards"
    print(f"{out}: {files}{writer.documents:,} documents, {tokens}, {shards}")


def _fill(writer: ShardWriter, source, workers: int) -> dict[Path, tuple[int, str]]:
    """Write all that is missing. Return the files left out: how many lines (0: all), and why."""
    val_tokens = writer.settings["val_tokens"]
    max_tokens = writer.settings["max_tokens"]
    most = max_tokens or sys.maxsize
    state = writer.resume()
    writer.encoders.add(writer.tokeniser.encoder_name)
    last_record = time.monotonic()
    # In a log: a line every half minute, and none for shorter work.
    pace = {"mininterval": 0.5} if sys.stderr.isatty() else {"mininterval": 30.0, "delay": 30.0}
    bar = tqdm(initial=writer.total, unit="tok", unit_scale=True, **pace)
    stream = encoded(chunks(source, state), writer.tokeniser.name, workers)
    with bar, contextlib.closing(stream):
        for chunk, answer in stream:
            tokens = answer.tokens[: most - writer.total]
            border = answer.validation
            if val_tokens is not None:  # the first ones, as llm.c has it
                border = max(0, val_tokens - writer.totals["val"])
            writer.append(tokens[:border], "val")
            writer.append(tokens[border:], "train")
            bar.update(len(tokens))
            if writer.total == most:
                break
            if chunk.state and time.monotonic() - last_record >= SECONDS_BETWEEN_RECORDS:
                writer.save(chunk.state)
                last_record = time.monotonic()
            bar.total = max_tokens or source.expected_tokens(writer.total)
    return {source.files[int(index)]: found for index, found in chunk.skipped.items()}


def report_left_out(left_out: dict[Path, tuple[int, str]]) -> None:
    """Print which files and lines were left out, and why."""
    counts = [lines for lines, _ in left_out.values()]
    if left_out:
        print(f"left out: files {counts.count(0)}, lines {sum(counts)}")
    for path, (lines, why) in itertools.islice(left_out.items(), MOST_LISTED):
        print(f"  {path}{f', {lines} lines, the first' if lines else ''} {why}")
    if len(left_out) > MOST_LISTED:
        print(f"  and {len(left_out) - MOST_LISTED} more files, listed in {MANIFEST}")


def _refuse_too_little(writer: ShardWriter) -> None:
    if writer.total == 0:
        raise UserError("the source holds no text; check its files, and --field if it takes one")
    for split, tokens in writer.totals.items():
        if tokens == 0:
            choice = "smaller" if split == "train" else "larger"
            raise UserError(
                f"the source is too small: its {writer.total} tokens leave nothing for {split}; "
                f"add text or choose a {choice} --val-tokens, and delete {writer.directory}"
            )


def token_count(text: str) -> int:
    """Parse `100M`, `1.5B`, `20K` or a plain number of tokens."""
    unit = {"K": 10**3, "M": 10**6, "B": 10**9}.get(text[-1:].upper())
    try:
        count = round(float(text[:-1]) * unit) if unit else int(text.replace("_", ""))
    except (ValueError, OverflowError):
        count = 0
    if not 1 <= count < 2**63:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of tokens like 100M")
    return count


def make_parser() -> Parser:
    parser = Parser(__doc__, prog="prepare.py")
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--out", type=Path, required=True, help="folder for the shards")
    spellings = ("--tokeniser", "--tokenizer")
    common.add_argument(*spellings, help="gpt2, or bytes for generated text")
    common.add_argument("--shard-tokens", type=token_count, default=10**8, help="default 100M")
    common.add_argument("--max-tokens", type=token_count, help="stop after this many")
    workers = whole(0, MOST_PROCESSES)
    common.add_argument("--workers", type=workers, help="default one per core, 0 for none")
    for name, (repository, _, samples) in HUB.items():
        hub = commands.add_parser(name, parents=[common], help=repository)
        hub.add_argument("--val-tokens", type=token_count, help="for validation, from the start")
        hub.add_argument("--sample", default="sample-10BT", help=" or ".join(samples))
        files = {"nargs": "+", "default": [], "metavar": "PARQUET"}
        hub.add_argument("--from-files", **files, help="read these, not the hub")
    text = commands.add_parser("text", parents=[common], help="your own files")
    text.add_argument("inputs", nargs="+", help="files, folders or patterns")
    text.add_argument("--field", default="text", help="of JSON lines and parquet; default text")
    val = "about this many validation tokens, from all over; default a twentieth, at most a shard"
    text.add_argument("--val-tokens", type=token_count, help=val)
    text.add_argument("--seed", type=seed_number, default=0, help="draws the validation documents")
    bad = "leave out and list damaged files, .txt that is not UTF-8, and lines that are not JSON"
    text.add_argument("--skip-bad", action="store_true", help=bad)
    commands.add_parser("stdlib", parents=[common], help="the standard library")
    commands.add_parser("sources", parents=[common], help="the standard library and torch")
    passkey = commands.add_parser("passkey", parents=[common], help="passkey prompts")
    passkey.add_argument("--longest", type=positive, default=128, help="bytes of a prompt")
    for name in TASKS:
        task = commands.add_parser(name, parents=[common], help=f"the task {name} of audit.py")
        task.add_argument("--length", type=positive, default=128, help="of training; %(default)s")
    download = commands.add_parser("download", help="ready-made shards")
    download.add_argument("name", help=" or ".join(READY_MADE))
    download.add_argument("--out", type=Path, required=True, help="folder for the shards")
    download.add_argument("--shards", type=positive, help="only the first N training shards")
    commands.add_parser("verify", help="re-read a set").add_argument("directory", type=Path)
    return parser


def make_source(arguments: argparse.Namespace):
    """Return the source that a command names; files left out of it go to `arguments.left_out`."""
    arguments.left_out = {}
    if arguments.command in ("stdlib", "sources"):
        return PythonSource(arguments.command)
    if arguments.command == "passkey":
        return PasskeySource(arguments.longest)
    if arguments.command in TASKS:
        return TaskSource(arguments.command, arguments.length)
    if arguments.command == "text":
        files, arguments.left_out = find_text(arguments.inputs)
        return TextSource(
            files,
            arguments.field,
            {"kind": "text", "field": arguments.field},
            sample=make_sample(files, arguments),
            skip_bad=arguments.skip_bad,
        )
    repository, prefix, samples = HUB[arguments.command]
    name = arguments.sample
    if name not in samples:
        raise UserError(
            f"{arguments.command} has no sample {name!r}; {did_you_mean(name, samples)}"
        )
    if files := find_parquet(arguments.from_files):
        return TextSource(files, "text", {"kind": arguments.command}, prefix)
    advice = "with the parquet files at hand, pass --from-files 'folder/*.parquet'"
    revision = pinned_revision(arguments.out, repository, advice)
    return HubSource(arguments.command, name, revision)


def make_sample(files: list[Path], arguments: argparse.Namespace) -> Sample:
    """Choose which part of own text is validation: a twentieth, at most about a shard."""
    # Compressed text is about three times as long.
    sizes = [p.stat().st_size * (3 if p.suffix in (".gz", ".parquet") else 1) for p in files]
    bytes_per_token = 4 if arguments.tokeniser == "gpt2" else 1
    tokens = min(sum(sizes) // bytes_per_token, arguments.max_tokens or sys.maxsize)
    one_in = max(20, tokens // arguments.shard_tokens)
    if arguments.val_tokens is not None:
        one_in = tokens // arguments.val_tokens
    if one_in < 2:
        raise UserError(
            f"--val-tokens {arguments.val_tokens} is more than half of the text, "
            f"which has about {tokens} tokens; choose fewer or add text"
        )
    # Even of a single file, validation has some forty parts, or ten if they would be short.
    size = tokens * bytes_per_token // one_in
    return Sample(one_in, max(1, size // 40, min(2048, size // 10)), arguments.seed)


def main(argv: list[str]) -> None:
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        raise UserError(f"unknown source {argv[0]!r}; {did_you_mean(argv[0], COMMANDS)}")
    arguments = make_parser().parse_args(argv)
    if arguments.command == "verify":
        totals = verify(arguments.directory)
        tokens = "{train:,} training tokens, {val:,} validation tokens".format(**totals)
        limits = ""
        if not (arguments.directory / MANIFEST).exists():
            limits = f"; no {MANIFEST}: headers and sizes are right, contents unknown"
        print(f"{arguments.directory} is sound: {tokens}{limits}")
        return
    if arguments.command == "download":
        download(arguments.name, arguments.out, arguments.shards)
        return
    if arguments.tokeniser is None:
        arguments.tokeniser = "bytes" if arguments.command in GENERATED else "gpt2"
    get_tokeniser(arguments.tokeniser)  # refused before anything is read or made
    if arguments.workers is None:
        # Encoding bytes costs less than handing them to another process.
        arguments.workers = 0 if arguments.tokeniser == "bytes" else usable_cores()
    if arguments.shard_tokens > MAX_SHARD_TOKENS:
        raise UserError(f"--shard-tokens {arguments.shard_tokens} is more than {MAX_SHARD_TOKENS}")
    source = make_source(arguments)
    if arguments.command not in HUB:
        arguments.val_tokens = None  # the source says which documents are validation
    elif (arguments.val_tokens or 0) > arguments.shard_tokens:
        raise UserError(
            f"--val-tokens {arguments.val_tokens} do not fit in one shard of "
            f"{arguments.shard_tokens}; choose fewer or a larger --shard-tokens"
        )
    else:
        arguments.val_tokens = arguments.val_tokens or arguments.shard_tokens
    prepare(source, arguments)
    if arguments.command == "stdlib":
        compare_with_published(arguments.out)


def usable_cores() -> int:
    """Count the cores that a container or a batch system allows us, where the system can say."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def compare_with_published(out: Path) -> None:
    """Print a note if the corpus is not the published one: each Python has its own library."""
    mine = describe_set(out)
    if mine["tokens_sha256"] != PUBLISHED_TOKENS_SHA256:
        print(
            f"note: {out} ({mine['source']}) is not the text of the published numbers "
            f"({PUBLISHED_SOURCE}): yours will differ from them"
        )


if __name__ == "__main__":
    run(main)
