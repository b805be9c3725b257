"""python data/prepare.py SOURCE --out DIR: turn text into verified token shards.

Sources:
  fineweb      HuggingFaceFW/fineweb from the hub, or --from-files 'x/*.parquet'
  fineweb-edu  HuggingFaceFW/fineweb-edu, likewise
  text         your own .txt, .jsonl(.gz) and .parquet files or folders of them
  stdlib       the Python standard library's sources: no network, a few seconds
  passkey      passkey prompts with their answers, to learn retrieval from: no network either
Others:
  download     ready-made llm.c shards of fineweb or fineweb-edu from the hub, checked
  verify DIR   re-read every byte of a set and compare with its manifest

An interrupted preparation continues when the same command is run again, and ends with the same
bytes. Shard 0 is validation.
"""

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

if not __package__:  # run as a script: the repository, not this folder, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[1])
if __name__ == "__main__":
    from support.command import quiet_imports

    quiet_imports()

from tqdm import tqdm

from data.download import READY_MADE, begun_revision, download, latest_revision
from data.passkey_text import PasskeySource
from data.pipeline import chunks, encoded
from data.shards import MANIFEST, MAX_SHARD_TOKENS, describe_set, verify
from data.sources import HUB, HubSource, StdlibSource, TextSource, find_files
from data.tokeniser import get_tokeniser
from data.writer import ShardWriter, forget_progress, recorded_settings, refuse_other_settings
from lssar.errors import UserError, did_you_mean
from support.command import MOST_PROCESSES, Parser, positive, run, whole
from support.files import locked, lookup

GENERATED = {"stdlib": StdlibSource, "passkey": PasskeySource}  # bytes, with a split of their own
COMMANDS = (*HUB, "text", *GENERATED, "download", "verify")
# Its `corpora` say which text the published numbers were trained and evaluated on.
PUBLISHED = Path(__file__).resolve().parents[1] / "results/nano/runs.json"
SECONDS_BETWEEN_RECORDS = 5.0  # what a kill can cost; each record syncs the disk


def prepare(source, arguments: argparse.Namespace) -> None:
    """Write the source's shards to --out, continuing if that was interrupted."""
    out, tokeniser = arguments.out, get_tokeniser(arguments.tokeniser)
    kept = ("tokeniser", "shard_tokens", "val_tokens", "max_tokens")
    settings = {key: getattr(arguments, key) for key in kept} | {"source": source.description}
    with locked(out):
        refuse_other_settings(out, recorded_settings(out), settings)
        if (out / MANIFEST).exists():
            forget_progress(out)
            print(f"{out} is already complete")
            return
        writer = ShardWriter(out, source.prefix, tokeniser, settings, arguments.shard_tokens)
        with contextlib.closing(writer):
            _fill(writer, source, arguments.workers)
            _refuse_too_little(writer)
            writer.finish()
    found = "{train:,} training and {val:,} validation tokens".format(**writer.totals)
    print(f"{out}: {found}, {len(writer.shards)} shards")


def _fill(writer: ShardWriter, source, workers: int) -> None:
    val_tokens, max_tokens = writer.settings["val_tokens"], writer.settings["max_tokens"]
    most = max_tokens or sys.maxsize
    (state, skip), last_record = writer.resume(), time.monotonic()
    interval = 0.5 if sys.stderr.isatty() else 30.0
    bar = tqdm(initial=writer.total, unit="tok", unit_scale=True, mininterval=interval)
    stream = encoded(chunks(source, state), writer.tokeniser.name, workers)
    with bar, contextlib.closing(stream):
        for chunk, tokens, encoder in stream:
            done = min(skip, len(tokens))
            skip -= done
            while done < len(tokens):
                in_validation = val_tokens is not None and writer.split == "val"
                room = (val_tokens if in_validation else writer.shard_tokens) - writer.partial
                part = tokens[done : done + min(room, most - writer.total)]
                writer.append(part, encoder)
                done += len(part)
                bar.update(len(part))
                if writer.total == most:
                    return
                if len(part) == room:
                    writer.close_shard()
                    writer.split = "train" if in_validation else writer.split
                    writer.save(chunk.state, done)
            if chunk.ends_validation and writer.split == "val":
                writer.close_shard()
                writer.split = "train"
            if time.monotonic() - last_record >= SECONDS_BETWEEN_RECORDS:
                writer.save(chunk.state, done)
                last_record = time.monotonic()
            bar.total = max_tokens or source.expected_tokens(writer.total)


def _refuse_too_little(writer: ShardWriter) -> None:
    if writer.total == 0:
        raise UserError("the source holds no text")
    for split, tokens in writer.totals.items():
        if tokens == 0:
            small = f"the source is too small: its {writer.total} tokens leave nothing for {split}"
            remedy = f"choose a smaller --val-tokens, and delete {writer.directory}"
            raise UserError(f"{small}; add text or {remedy}")


def token_count(text: str) -> int:
    """`100M`, `1.5B`, `20K` or a plain number of tokens."""
    unit = {"K": 10**3, "M": 10**6, "B": 10**9}.get(text[-1:].upper())
    try:
        count = int(float(text[:-1]) * unit) if unit else int(text.replace("_", ""))
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
    common.add_argument("--tokeniser", help="gpt2 (default), bytes (default for stdlib, passkey)")
    common.add_argument("--shard-tokens", type=token_count, default=10**8, help="default 100M")
    common.add_argument("--max-tokens", type=token_count, help="stop after this many")
    workers = whole(0, MOST_PROCESSES)
    common.add_argument("--workers", type=workers, help="default one per core, 0 for none")
    val = argparse.ArgumentParser(add_help=False)
    val.add_argument("--val-tokens", type=token_count, help="tokens for validation, from the start")
    for name, (repository, _, samples) in HUB.items():
        hub = commands.add_parser(name, parents=[common, val], help=repository)
        hub.add_argument("--sample", default="sample-10BT", help=" or ".join(samples))
        files = {"nargs": "+", "default": [], "metavar": "PARQUET"}
        hub.add_argument("--from-files", **files, help="read these, not the hub")
    text = commands.add_parser("text", parents=[common, val], help="your own files")
    text.add_argument("inputs", nargs="+", help="files, folders or patterns")
    text.add_argument("--field", default="text", help="of JSON lines and parquet; default text")
    commands.add_parser("stdlib", parents=[common], help="the standard library")
    passkey = commands.add_parser("passkey", parents=[common], help="passkey prompts")
    passkey.add_argument("--longest", type=positive, default=128, help="bytes of a prompt")
    download = commands.add_parser("download", help="ready-made shards")
    download.add_argument("name", help=" or ".join(READY_MADE))
    download.add_argument("--out", type=Path, required=True, help="folder for the shards")
    download.add_argument("--shards", type=positive, help="only the first N training shards")
    commands.add_parser("verify", help="re-read a set").add_argument("directory", type=Path)
    return parser


def make_source(arguments: argparse.Namespace):
    if arguments.command in GENERATED:
        longest = (arguments.longest,) if arguments.command == "passkey" else ()
        return GENERATED[arguments.command](*longest)
    if arguments.command == "text":
        kind = {"kind": "text", "field": arguments.field}
        return TextSource(find_files(arguments.inputs), arguments.field, kind)
    (repository, prefix, samples), name = HUB[arguments.command], arguments.sample
    if name not in samples:
        what = f"{arguments.command} has no sample {name!r}"
        raise UserError(f"{what}; {did_you_mean(name, samples)}")
    if files := find_files(arguments.from_files, (".parquet",)):
        return TextSource(files, "text", {"kind": arguments.command}, prefix)
    advice = "with the parquet files at hand, pass --from-files 'folder/*.parquet'"
    revision = begun_revision(arguments.out) or latest_revision(repository, advice)
    return HubSource(arguments.command, name, revision)


def number_of_validation_tokens(arguments: argparse.Namespace, source) -> int | None:
    """By default llm.c's first shard, a twentieth of own text; None: the source splits itself."""
    if arguments.command in GENERATED:
        return None
    tokens = arguments.val_tokens or arguments.shard_tokens
    if arguments.val_tokens is None and arguments.command == "text":
        bytes_per_token = 4 if arguments.tokeniser == "gpt2" else 1
        tokens = min(tokens, max(1, source.total_bytes // (20 * bytes_per_token)))
    if tokens > arguments.shard_tokens:
        fit = f"--val-tokens {tokens} do not fit in one shard of {arguments.shard_tokens}"
        raise UserError(f"{fit}; choose fewer or a larger --shard-tokens")
    return tokens


def main(argv: list[str]) -> None:
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        raise UserError(f"unknown source {argv[0]!r}; {did_you_mean(argv[0], COMMANDS)}")
    arguments = make_parser().parse_args(argv)
    if arguments.command == "verify":
        found = "{train:,} training tokens, {val:,} validation tokens"
        print(f"{arguments.directory} is sound:", found.format(**verify(arguments.directory)))
        return
    if arguments.command == "download":
        download(arguments.name, arguments.out, arguments.shards)
        return
    if arguments.tokeniser is None:
        arguments.tokeniser = "bytes" if arguments.command in GENERATED else "gpt2"
    get_tokeniser(arguments.tokeniser)  # refused before anything is read or made
    if arguments.workers is None:
        # What a container or a batch system allows us, where the system can say.
        allowed = getattr(os, "sched_getaffinity", lambda pid: range(os.cpu_count() or 1))(0)
        # Encoding bytes costs less than handing them to another process.
        arguments.workers = 0 if arguments.tokeniser == "bytes" else len(allowed)
    if arguments.shard_tokens > MAX_SHARD_TOKENS:
        raise UserError(f"--shard-tokens {arguments.shard_tokens} is more than {MAX_SHARD_TOKENS}")
    source = make_source(arguments)
    arguments.val_tokens = number_of_validation_tokens(arguments, source)
    prepare(source, arguments)
    if arguments.command == "stdlib":
        compare_with_published(arguments.out)


def compare_with_published(out: Path) -> None:
    """Note that the corpus is not the published one: each Python has its own library."""
    published, mine = lookup(PUBLISHED, "corpora", "corpora/stdlib"), describe_set(out)
    # A copy of the code may come without results.
    if published and mine["tokens_sha256"] != published["tokens_sha256"]:
        other = f"is not the text of the published numbers ({published['source']})"
        print(f"note: {out} ({mine['source']}) {other}: yours will differ from them")


if __name__ == "__main__":
    run(main)
