"""A preparation killed at any instant, or stopped by a full disk, ends with the same bytes."""

import gzip
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from data_sets import REPOSITORY, contents, run_prepare, text_corpus
from full_disk import files_of_at_most

from data import own_text
from data.prepare import main
from data.tokeniser import BPE_FILES, get_tokeniser
from data.writer import ShardWriter, read_progress
from lssar.errors import UserError
from support.files import write_json

# Forks preparations and kills them with SIGKILL after growing delays until one gets through, every
# other one recording its progress after each chunk; prints how many were killed. One process that
# has imported everything, which takes seconds.
KILLER = """
import itertools, json, os, signal, sys, time
import datasets, pyarrow.dataset, pyarrow.parquet, torch
import data.pipeline, data.prepare, data.tokeniser

data.tokeniser.get_tokeniser("gpt2")
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

def attempt(arguments, delay):
    child = os.fork()
    if child == 0:
        data.prepare.main(arguments)
        os._exit(0)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

for arguments, chunk, delay in json.loads(sys.argv[1]):
    data.pipeline.CHUNK_CHARS = chunk
    for killed in itertools.count():
        data.prepare.SECONDS_BETWEEN_RECORDS = 1000 * (killed % 2)
        if attempt(arguments, delay) == 0:
            break
        delay *= 1.3
    print("killed", killed, flush=True)
"""


SOURCES = {
    "hub": ["fineweb", "--from-files", "{corpus}/*.parquet", "--shard-tokens=9999"],
    "text": ["text", "{corpus}", "--shard-tokens=30K", "--val-tokens=9K", "--skip-bad"],
    "stdlib": ["stdlib", "--shard-tokens=900K"],
}


@pytest.fixture
def out():
    """Use a memory disk where there is one: what is tested is killing, not waiting for fsync."""
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None)
    yield Path(folder) / "out"
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    text_corpus(folder / "corpus")
    (folder / "corpus" / "1.txt").write_bytes(b"sound words " * 200_000 + b"\xff")
    (folder / "corpus" / "4.jsonl").write_text('{"text": "fine"}\n{"text": \n' * 9_000)
    sets = {}
    for name, command in SOURCES.items():
        arguments = [part.format(corpus=folder / "corpus") for part in command] + ["--workers=0"]
        main([*arguments, "--out", str(folder / name)])
        sets[name] = (arguments, contents(folder / name))
        assert len(sets[name][1]) > 5
    assert len(json.loads(sets["text"][1]["manifest.json"])["skipped"]) == 2
    return sets


def test_killed_again_and_again_every_source_ends_with_the_same_bytes(out, uninterrupted):
    chunk = {"hub": 20_000, "text": 20_000, "stdlib": 300_000}
    soon = 0.02  # seconds before the first kill: too few for any machine to be done by the third
    jobs = [
        ([*arguments, "--out", str(out / name)], chunk[name], soon)
        for name, (arguments, _) in uninterrupted.items()
    ]
    done = subprocess.run(
        [sys.executable, "-c", KILLER, json.dumps(jobs)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    killed = [int(line.split()[1]) for line in done.stdout.splitlines() if "killed" in line]
    assert len(killed) == 3
    assert min(killed) >= 3, "nothing was interrupted"
    for name, (_, expected) in uninterrupted.items():
        assert contents(out / name) == expected, name


def test_killed_with_workers_it_continues_and_leaves_no_process(out, uninterrupted):
    arguments, expected = uninterrupted["text"]
    command = [sys.executable, "data/prepare.py", *arguments[:-1], "--workers=2", "--out"]
    marker = str(out)
    process = subprocess.Popen(
        [*command, marker], cwd=REPOSITORY, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    while process.poll() is None and not list(out.glob("*_train_*.bin")):
        time.sleep(0.001)
    process.kill()
    process.communicate()  # returns when the workers too have let go of the pipes
    done = run_prepare(*arguments[:-1], "--workers=2", "--out", marker)
    assert done.returncode == 0, done.stderr
    assert contents(out) == expected


def test_a_full_disk_is_one_line_and_nothing_finished_is_lost(out, uninterrupted):
    arguments, expected = uninterrupted["hub"]
    arguments = [*arguments, "--out", str(out)]
    for limit, place in ((300, "progress.json"), (15_000, "val_000000.bin")):
        message = f"{place}: File too large; nothing finished is lost"
        with files_of_at_most(limit), pytest.raises(UserError, match=message) as refused:
            main(arguments)
        assert "\n" not in str(refused.value)
    main(arguments)
    assert contents(out) == expected


def interrupted(out, uninterrupted, monkeypatch):
    """Return a folder as a kill in the middle of a shard leaves it."""
    arguments, expected = uninterrupted["hub"]
    monkeypatch.setattr("data.prepare.SECONDS_BETWEEN_RECORDS", 0.0)
    monkeypatch.setattr("data.pipeline.CHUNK_CHARS", 20_000)
    monkeypatch.setattr("data.prepare._refuse_too_little", lambda writer: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main([*arguments, "--out", str(out)])
    monkeypatch.undo()
    return [*arguments, "--out", str(out)], expected


def test_settings_may_not_change_in_the_middle(out, uninterrupted, monkeypatch):
    arguments, expected = interrupted(out, uninterrupted, monkeypatch)
    with pytest.raises(UserError, match=r"other settings \(tokeniser gpt2 then, bytes now"):
        main([*arguments, "--tokeniser=bytes"])
    main(arguments)
    assert contents(out) == expected


def test_damage_to_an_unfinished_set_is_named(out, uninterrupted, monkeypatch):
    arguments, expected = interrupted(out, uninterrupted, monkeypatch)
    assert read_progress(out)["growing"]["train"][1] > 0
    record = (out / "progress.json").read_text()
    other = record.replace('"documents": ', '"documents": "",  "other": ')
    for damaged in (record[:-9], other, "null", "[" * 9999):
        (out / "progress.json").write_text(damaged)
        with pytest.raises(UserError, match=r"progress\.json is damaged"):
            main(arguments)
    (out / "progress.json").write_text(record)
    finished = next(iter(sorted(out.glob("*.bin"))))
    kept = finished.read_bytes()
    finished.unlink()
    with pytest.raises(UserError, match=f"{finished.name} is gone"):
        main(arguments)
    finished.write_bytes(kept)
    partial = next(out.glob("*.bin.tmp"))
    kept = partial.read_bytes()
    partial.write_bytes(kept[:1024])
    with pytest.raises(UserError, match=r"\.bin\.tmp was lost or cut"):
        main(arguments)
    partial.write_bytes(kept)
    main(arguments)
    assert contents(out) == expected


def stopped_in_the_middle(out, uninterrupted, monkeypatch):
    """Return a command that has stopped with a few records written and most of the text unread."""
    arguments, _ = uninterrupted["hub"]
    save, records = ShardWriter.save, []

    def save_and_stop(writer, *position):
        save(writer, *position)
        records.append(position)
        if len(records) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr("data.prepare.SECONDS_BETWEEN_RECORDS", 0.0)
    monkeypatch.setattr("data.pipeline.CHUNK_CHARS", 20_000)
    monkeypatch.setattr(ShardWriter, "save", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        main([*arguments, "--out", str(out)])
    monkeypatch.undo()
    return [*arguments, "--out", str(out)]


def test_the_manifest_names_every_encoder_that_wrote_the_set(out, uninterrupted, monkeypatch):
    """Begun with one version of tiktoken, and finished with another."""
    monkeypatch.setattr(get_tokeniser("gpt2"), "encoder_name", "tiktoken 0.0.1")
    command = stopped_in_the_middle(out, uninterrupted, monkeypatch)
    main(command)
    manifest = json.loads((out / "manifest.json").read_text())
    now = f"tiktoken {importlib.metadata.version('tiktoken')}"
    assert manifest["encoders"] == ["tiktoken 0.0.1", now]
    assert manifest["merges_sha256"] == BPE_FILES["vocab.bpe"]


def test_the_manifest_of_bytes_names_utf_8(uninterrupted):
    manifest = json.loads(uninterrupted["stdlib"][1]["manifest.json"])
    assert (manifest["encoders"], manifest["merges_sha256"]) == (["utf-8"], None)


def test_another_record_of_progress_is_refused_in_one_line(out, uninterrupted, monkeypatch):
    command = stopped_in_the_middle(out, uninterrupted, monkeypatch)
    write_json(out / "progress.json", {"progress": read_progress(out)})
    with pytest.raises(UserError, match=r"progress\.json is damaged .* start again"):
        main(command)


# --- every state ---------------------------------------------------------------------------------


def own_corpus(folder):
    """Write many small files, large files, compressed ones, JSON lines and parquet."""
    folder.mkdir()
    for number in range(40):
        (folder / f"small{number:02d}.txt").write_text(f"{number} a few words\n" * (number % 7))
    long = "".join(f"{n} Zürich 中文 don't  stop\n" for n in range(900))
    (folder / "large.md").write_text(long)
    (folder / "solid.txt").write_text("中" * 9_000)
    (folder / "marked.txt").write_bytes(b"\xef\xbb\xbf" + long[:5_000].encode())
    (folder / "packed.txt.gz").write_bytes(gzip.compress(long[5_000:].encode()))
    lines = "".join(json.dumps({"text": f"line {n} " * (n % 9)}) + "\n" for n in range(150))
    (folder / "lines.jsonl").write_text(lines + "not JSON\n" + lines)
    (folder / "lines.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    table = pyarrow.table({"text": [f"row {n} " * (n % 9) for n in range(99)]})
    pyarrow.parquet.write_table(table, folder / "rows.parquet", row_group_size=17)
    return folder


def test_own_text_continues_alike_from_every_state(tmp_path, monkeypatch):
    """After any list of pieces, a new source gives the rest that an undisturbed one gives."""
    monkeypatch.setattr(own_text, "CHUNK_CHARS", 5_000)
    monkeypatch.setattr(own_text, "LONGEST_SOLID", 15_000)
    own_corpus(tmp_path / "in")
    (tmp_path / "in" / "rows.parquet").unlink()  # slow to open; the next test has it

    def source():
        files, left_out = own_text.find_text([str(tmp_path / "in")])
        assert not left_out
        sample = own_text.Sample(one_in=7, longest=300)
        return own_text.TextSource(files, "text", {}, sample=sample, skip_bad=True)

    undisturbed = source()
    lists, states = [], []
    for pieces in undisturbed.pieces(None):
        lists.append(pieces)
        states.append(json.loads(json.dumps(undisturbed.state())))
    assert len({state["file"] for state in states}) > 35
    for number, state in enumerate(states):
        resumed = source()
        assert list(resumed.pieces(state)) == lists[number + 1 :], state
        assert resumed.skipped == undisturbed.skipped


def test_own_text_stopped_at_any_record_ends_with_the_same_bytes(out, tmp_path, monkeypatch):
    monkeypatch.setattr(own_text, "CHUNK_CHARS", 5_000)
    monkeypatch.setattr("data.pipeline.CHUNK_CHARS", 3_000)
    monkeypatch.setattr("data.prepare.SECONDS_BETWEEN_RECORDS", 0.0)
    arguments = ["text", str(own_corpus(tmp_path / "in")), "--tokeniser=bytes", "--skip-bad"]
    arguments += ["--shard-tokens=9K", "--val-tokens=4K", "--out"]
    save, saved, stop_at = ShardWriter.save, [], None

    def save_and_stop(writer, *position):
        save(writer, *position)
        saved.append(position)
        if len(saved) == stop_at:
            raise KeyboardInterrupt

    monkeypatch.setattr(ShardWriter, "save", save_and_stop)
    main([*arguments, str(tmp_path / "undisturbed")])
    expected, records = contents(tmp_path / "undisturbed"), len(saved)
    assert records > 20
    for place in range(1, records + 1):
        saved, stop_at = [], place
        with pytest.raises(KeyboardInterrupt):
            main([*arguments, str(out / str(place))])
        stop_at = None
        main([*arguments, str(out / str(place))])
        assert contents(out / str(place)) == expected, place
