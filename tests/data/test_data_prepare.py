"""Preparation: the right tokens from every source, and one clear line for every mistake."""

import gzip
import json
import multiprocessing
import os
import platform
import signal
import tempfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from cases import cases
from data_sets import contents, read_stream, run_prepare

from data import own_text, sources
from data.pipeline import Chunk, Piece, encoded
from data.prepare import PUBLISHED_SOURCE, PUBLISHED_TOKENS_SHA256, main
from data.shards import describe_set, open_split, verify
from data.tokeniser import get_tokeniser
from lssar.errors import UserError

GPT2 = get_tokeniser("gpt2")
DOCUMENTS = [
    f"Document {i}: Zürich, 中文 and don't… " * (1 + 7 * i % 40) + "\n\n  end" for i in range(60)
]
DOCUMENTS[7] = "longer than many shards " * 2000
DOCUMENTS[11] = "<|endoftext|> is only text here"


def stream_of(documents):
    """Return what a preparation must write, the obvious way."""
    return [i for text in documents for i in (50256, *GPT2._bpe.encode_ordinary(text))]


def write_parquet(path, texts, **options):
    table = pyarrow.table({"text": texts, "id": [str(i) for i in range(len(texts))]})
    pyarrow.parquet.write_table(table, path, **options)


def whole_stream(folder):
    return [*read_stream(folder, "val").tolist(), *read_stream(folder, "train").tolist()]


def text_tokens(stream):
    """Return the tokens of text split in two: in no order, without the ends of documents."""
    return sorted(token for token in stream if token != 50256)


def refuses(match, *arguments):
    with pytest.raises(UserError, match=match) as caught:
        main([str(argument) for argument in arguments])
    assert "\n" not in str(caught.value)


@pytest.fixture
def parquet(tmp_path):
    folder = tmp_path / "parquet"
    folder.mkdir()
    with_holes = [*DOCUMENTS[:20], "", None]
    write_parquet(folder / "0.parquet", with_holes, row_group_size=7)
    write_parquet(folder / "1.parquet", DOCUMENTS[20:], row_group_size=1000)
    return f"{folder}/*.parquet"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("source", ["fineweb", "fineweb-edu"])
def test_parquet_files_become_llm_c_s_stream(parquet, tmp_path, source, workers):
    out = tmp_path / "out"
    main([source, "--from-files", parquet, "--shard-tokens=1000", f"--workers={workers}",
          "--out", str(out)])  # fmt: skip
    expected = stream_of(DOCUMENTS)
    assert whole_stream(out) == expected
    assert len(read_stream(out, "val")) == 1000
    prefix = "fineweb" if source == "fineweb" else "edu_fineweb"
    names = sorted(path.name for path in out.glob("*.bin"))
    assert names[0] == f"{prefix}_train_000001.bin"
    assert names[-1] == f"{prefix}_val_000000.bin"
    assert len(names) == -(-len(expected) // 1000)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["documents"] == 60
    assert manifest["tokens"] == {"train": len(expected) - 1000, "val": 1000}
    assert verify(out) == manifest["tokens"]


def test_parquet_is_read_where_the_home_cannot_be_written(tmp_path):
    write_parquet(tmp_path / "mine.parquet", DOCUMENTS[:9], row_group_size=4)
    out, temporary = tmp_path / "out", tmp_path / "temporary"
    temporary.mkdir()
    places = {"HOME": "/proc/nowhere", "TMPDIR": str(temporary)}
    kept = {k: v for k, v in os.environ.items() if k not in ("HF_HOME", "XDG_CACHE_HOME")}
    done = run_prepare(
        "text", tmp_path / "mine.parquet", "--workers=0", "--out", out, env=kept | places
    )
    assert done.returncode == 0, done.stderr
    assert text_tokens(whole_stream(out)) == text_tokens(stream_of(DOCUMENTS[:9]))
    assert done.stderr.count("set HF_HOME to one that can be written") == 1


def test_a_long_text_file_is_read_in_parts(tmp_path):
    """Also without any place to cut, and with characters across the borders of blocks."""
    for name, text in {"words": "ünïcode wörds " * 200_000, "solid": "中" * 900_000}.items():
        path = tmp_path / f"{name}.txt"
        path.write_text(text)
        pieces = [
            p for group in own_text.TextSource([path], "text", {}).pieces(None) for p in group
        ]
        assert "".join(piece.text for piece in pieces) == text
        assert [piece.starts for piece in pieces] == [True] + [False] * (len(pieces) - 1)
        assert (len(pieces) > 1) == (name == "words")


def test_the_standard_library_is_split_by_file_and_says_which(tmp_path):
    out, again = tmp_path / "out", tmp_path / "again"
    main(["stdlib", "--out", str(out)])
    main(["stdlib", "--out", str(again)])
    assert contents(out) == contents(again)
    manifest = json.loads((out / "manifest.json").read_text())
    source = manifest["settings"]["source"]
    splits = {split: [n for n, f in source["files"].items() if f["split"] == split]
              for split in ("train", "val")}  # fmt: skip
    texts = sources.PythonSource("stdlib").texts
    for split, names in splits.items():
        documents = (texts[name].encode() for name in names if texts[name])
        expected = [np.frombuffer(b"\0" + text, np.uint8).astype(np.uint16) for text in documents]
        for document in expected:
            document[0] = 256
        assert np.array_equal(read_stream(out, split), np.concatenate(expected))
    val, train = manifest["tokens"]["val"], manifest["tokens"]["train"]
    assert 0.05 < val / (val + train) < 0.15
    assert val > 16 * 16384  # room for sequences of 16K spread over it
    assert train > 5e6
    assert not any("test" in Path(name).parts for name in source["files"])
    assert open_split(out, "val", vocab_size=257).tokeniser == "bytes"


def test_another_standard_library_than_the_published_numbers_is_said(tmp_path, monkeypatch, capsys):
    main(["stdlib", "--out", str(tmp_path / "mine")])
    printed, mine = capsys.readouterr().out, describe_set(tmp_path / "mine")
    assert ("note: " in printed) == (mine["tokens_sha256"] != PUBLISHED_TOKENS_SHA256)
    assert mine["source"] == f"Python {platform.python_version()} standard library"

    monkeypatch.setattr(platform, "python_version", lambda: "3.99.1")
    monkeypatch.setattr(sources, "_python_source", lambda path: f"# {path.name}\n" * 9)
    command = ["stdlib", "--out", str(tmp_path / "other")]
    for _ in range(2):  # when it is made, and when it is there
        main(command)
        assert (
            f"note: {tmp_path}/other (Python 3.99.1 standard library) is not the text of the "
            f"published numbers ({PUBLISHED_SOURCE})"
        ) in capsys.readouterr().out


def test_max_tokens_stops_exactly_and_the_half_read_stream_is_released(parquet, tmp_path):
    out = tmp_path / "out"
    done = run_prepare("fineweb", "--from-files", parquet, "--shard-tokens=1000",
                       "--max-tokens=2500", "--out", out)  # fmt: skip
    assert (done.returncode, done.stderr.count("error")) == (0, 0), done.stderr
    assert whole_stream(out) == stream_of(DOCUMENTS)[:2500]
    assert "1,500 training and 1,000 validation tokens, 3 shards" in done.stdout


def test_a_finished_set_is_left_alone_and_other_settings_are_refused(parquet, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["fineweb", "--from-files", parquet, "--workers=0", "--out", str(out)]
    main([*command, "--shard-tokens=1000"])
    before = contents(out)
    main([*command, "--shard-tokens=1000"])
    assert "already complete" in capsys.readouterr().out
    refuses(r"other settings \(shard_tokens 1000 then, 999 now", *command, "--shard-tokens=999")
    assert contents(out) == before


def test_shards_of_someone_else_are_never_overwritten(parquet, tmp_path):
    foreign = tmp_path / "fineweb_train_000001.bin"
    foreign.write_bytes(b"precious")
    refuses("already holds fineweb_train_000001.bin", "fineweb", "--from-files", parquet,
            "--shard-tokens=1000", "--out", tmp_path)  # fmt: skip
    assert foreign.read_bytes() == b"precious"


def test_two_preparations_of_one_folder_are_not_at_once(tmp_path):
    from support.files import locked

    (tmp_path / "a.txt").write_text("text")
    with locked(tmp_path / "out"):
        refuses("is being written by another process", "text", tmp_path / "a.txt", "--out",
                tmp_path / "out")  # fmt: skip


def test_missing_and_unusable_inputs_are_one_line_each(tmp_path):
    out = ["--out", tmp_path / "out"]
    refuses("nowhere.txt does not exist", "text", tmp_path / "nowhere.txt", *out)
    refuses("parquet does not exist", "fineweb", "--from-files", f"{tmp_path}/*.parquet", *out)
    (tmp_path / "folder").mkdir()
    refuses(r"folder holds no text files", "text", tmp_path / "folder", *out)
    (tmp_path / "a.pdf").write_bytes(b"%PDF\0\xff")
    refuses(r"a\.pdf is not text", "text", tmp_path / "a.pdf", *out)
    refuses(r"a\.pdf is not a \.parquet", "fineweb", "--from-files", tmp_path / "a.pdf", *out)
    (tmp_path / "fake.parquet").write_bytes(b"PAR1 not really")
    refuses("fake.parquet is not a parquet file", "text", tmp_path / "fake.parquet", *out)
    pyarrow.parquet.write_table(pyarrow.table({"texts": ["a"]}), tmp_path / "col.parquet")
    refuses("no column 'text'; did you mean 'texts'", "text", tmp_path / "col.parquet", *out)
    assert not (tmp_path / "out").exists()


def test_damaged_text_is_one_line(tmp_path):
    examples = [
        ("a.txt", b"caf\xe9 au lait", r"a\.txt is not UTF-8 \(byte 3\)"),
        ("b.txt", b"cut \xe4\xb8", r"b\.txt is not UTF-8 \(byte 4\)"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', r"a\.jsonl, line at byte 14: not JSON"),
        ("b.jsonl", b'{"body": "x"}', r"no text in 'text' \(there is: 'body'\)"),
        ("c.jsonl", b'{"text": 7}', r"no text in 'text'"),
        ("d.jsonl", b"[1]", r"no text in 'text' \(there is: list\)"),
        ("e.jsonl", b'{"text": "\xff"}', r"e\.jsonl, line at byte 0: not UTF-8"),
        ("f.jsonl", b"[" * 100_000, r"f\.jsonl, line at byte 0: not JSON"),
        ("a.jsonl.gz", b"no gzip", r"a\.jsonl\.gz is damaged: Not a gzipped file"),
        (
            "b.jsonl.gz",
            gzip.compress(b'{"text": "x"}\n' * 99, mtime=0)[:-9],
            r"b\.jsonl\.gz is damaged",
        ),
    ]
    for name, data, match in cases(examples):
        (tmp_path / name).write_bytes(data)
        refuses(match, "text", tmp_path / name, "--workers=0", "--out", tmp_path / "out")


def test_a_field_of_another_name_is_read_with_field(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "some text that is long enough"}\n' * 20)
    main(["text", f"{tmp_path}/a.jsonl", "--field=body", "--workers=0",
          "--out", str(tmp_path / "out")])  # fmt: skip
    text = ["some text that is long enough"] * 20
    assert text_tokens(whole_stream(tmp_path / "out")) == text_tokens(stream_of(text))


def test_empty_and_too_small_corpora_are_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    out = ["--workers=0", "--out", tmp_path / "out"]
    refuses("the source holds no text", "text", tmp_path / "empty.txt", *out)
    (tmp_path / "small.txt").write_text("words")
    # The empty attempt left nothing that could forbid this one.
    refuses("too small: its 2 tokens leave nothing for val", "text", tmp_path / "small.txt", *out)
    refuses("--val-tokens 100 is more than half", "text", tmp_path / "small.txt",
            "--val-tokens=100", *out)  # fmt: skip


def test_mistyped_commands_are_one_line(tmp_path, monkeypatch):
    examples = [
        (["finweb"], "unknown source 'finweb'; did you mean 'fineweb'"),
        ([], "required"),
        (["stdlib"], "--out"),
        (["stdlib", "--tokeniser=gtp2", "--out=x"], "did you mean 'gpt2'"),
        (["stdlib", "--shard-tokens=many", "--out=x"], "'many' is not a number of tokens"),
        (["stdlib", "--shard-tokens=0", "--out=x"], "'0' is not a number"),
        (
            ["fineweb", "--from-files=x", "--val-tokens=2M", "--shard-tokens=1M", "--out=x"],
            "x does",
        ),
        (["stdlib", "--shard-tokens=3B", "--out=x"], "is more than 2147483647"),
        (["stdlib", "--workers=-1", "--out=x"], "--workers: '-1' must be at least 0"),
        (["download", "finewep", "--out=x"], "did you mean 'fineweb'"),
        (["download", "fineweb", "--shards=0", "--out=x"], "--shards: '0' must be at least 1"),
    ]
    monkeypatch.chdir(tmp_path)
    for arguments, match in cases(examples):
        refuses(match, *arguments)
        assert not list(tmp_path.iterdir())


def test_an_unknown_sample_is_answered_with_the_nearest(parquet, tmp_path):
    refuses("did you mean 'sample-100BT'", "fineweb-edu", "--sample=sample-100B", "--from-files",
            parquet, "--out", tmp_path / "out")  # fmt: skip


@pytest.mark.parametrize("where", ["input", "output"])
def test_no_permission_is_one_line(where):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "a.txt").write_text("text " * 100)
        (folder / "a.txt").chmod(0 if where == "input" else 0o644)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        elif where == "output":
            folder.chmod(0o555)
        try:
            match = {"input": "cannot read .*a.txt: Permission denied",
                     "output": "cannot write .*out: Permission denied"}[where]  # fmt: skip
            refuses(match, "text", folder / "a.txt", "--workers=0", "--out", folder / "out")
        finally:
            if root:
                os.seteuid(0)
            folder.chmod(0o755)


def test_a_killed_worker_is_reported_not_waited_for():
    text = [Piece("some words " * 1000)]
    stream = encoded((Chunk(text) for _ in range(10_000)), "gpt2", workers=2)
    next(stream)
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    with pytest.raises(UserError, match="a worker process died"):
        list(stream)


def test_chunks_come_back_in_order_whatever_their_cost():
    texts = ["x " * (50_000 if i % 5 == 0 else 1) + str(i) for i in range(30)]
    stream = (Chunk([Piece(text)], i) for i, text in enumerate(texts))
    for i, (chunk, answer) in enumerate(encoded(stream, "gpt2", workers=2)):
        assert chunk.state == i
        assert answer.tokens.tolist() == stream_of([texts[i]])
    assert i == 29


def test_memory_is_bounded_by_the_chunks_under_way():
    """The source is never asked for more than a few chunks beyond what has come out."""
    taken = []
    stream = (taken.append(i) or Chunk([Piece("a b")], i) for i in range(200))
    results = encoded(stream, "gpt2", workers=2)
    for done, _ in enumerate(results, start=1):
        assert len(taken) <= done + 5
    assert done == 200


def test_tokens_are_uint16_on_disk(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "Hello world"}\n' * 40)
    main(["text", f"{tmp_path}/a.jsonl", "--out", str(tmp_path / "out")])
    data = (tmp_path / "out" / "text_train_000001.bin").read_bytes()
    assert np.frombuffer(data[1024:], "<u2").tolist()[:3] == [50256, 15496, 995]
