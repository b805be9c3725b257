"""`prepare.py text`: validation from all over the text, and files that are not what they seem."""

import gzip
import itertools
import json
import os
import random
import tracemalloc

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from data_sets import contents, read_stream

from data import own_text
from data.prepare import main
from data.shards import verify
from data.tokeniser import get_tokeniser
from lssar.errors import UserError

BYTES = get_tokeniser("bytes")


def prepare(folder, out, *options, tokeniser="bytes"):
    main(["text", str(folder), f"--tokeniser={tokeniser}", *options, "--out", str(out)])
    return json.loads((out / "manifest.json").read_text())


def documents(out, split, tokeniser=BYTES):
    """Return the texts between the end-of-text tokens of a split."""
    stream = read_stream(out, split)
    assert not len(stream) or stream[0] == tokeniser.eot
    return [tokeniser.decode(part[1:]) for part in
            np.split(stream, np.flatnonzero(stream == tokeniser.eot)) if len(part)]  # fmt: skip


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def words(seed, count):
    """Return text in which no ten words occur twice."""
    chance = random.Random(seed)
    return " ".join(f"{chance.randrange(10**6)}" for _ in range(count))


def test_own_text_of_every_kind_is_read_in_the_order_of_its_names(tmp_path):
    texts = [f"Zürich, 中文 and don't… {words(i, 40)}\n\n  end" for i in range(20)]
    folder = tmp_path / "mine"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbf" + texts[0].encode())
    lines = [json.dumps({"text": t, "n": 1}) for t in texts[1:4]] + ["", '{"text": null}']
    (folder / "b.jsonl").write_text("\n".join(lines))
    with gzip.open(folder / "c.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts[4:7])
    table = pyarrow.table({"text": [*texts[7:19], "", None]})
    pyarrow.parquet.write_table(table, folder / "deep" / "d.parquet", row_group_size=5)
    with gzip.open(folder / "deep" / "e.txt.gz", "wt", newline="") as file:
        file.write("compressed\r\ntext")
    (folder / "photo.png").write_bytes(b"\x89PNG\0\0")
    (folder / "empty.txt").write_text("")
    prepare(folder, tmp_path / "out", tokeniser="gpt2")
    gpt2 = get_tokeniser("gpt2")
    found = {split: documents(tmp_path / "out", split, gpt2) for split in ("val", "train")}
    for split, parts in found.items():
        stream = [i for text in parts for i in (50256, *gpt2._bpe.encode_ordinary(text))]
        assert read_stream(tmp_path / "out", split).tolist() == stream
    whole = "".join([*texts[:19], "compressed\r\ntext"])
    places = sorted((whole.index(text), text) for parts in found.values() for text in parts)
    assert "".join(text for _, text in places) == whole
    assert [whole.index(text) for text in found["train"]] == sorted(
        map(whole.index, found["train"])
    )


# --- the split -----------------------------------------------------------------------------------


def test_one_whole_document_in_twenty_is_validation(tmp_path):
    (tmp_path / "in").mkdir()
    texts = [f"{i}: {words(i, 9 + i % 7)}" for i in range(1000)]
    for part in range(5):
        write_lines(tmp_path / "in" / f"{part}.jsonl", texts[200 * part : 200 * part + 200])
    manifest = prepare(tmp_path / "in", tmp_path / "out")
    val, train = (documents(tmp_path / "out", split) for split in ("val", "train"))
    assert sorted(val + train) == sorted(texts)
    places = [texts.index(text) for text in val]
    assert sorted(place // 20 for place in places) == list(range(50)), "one of every twenty"
    assert len({place // 100 for place in places[:15]}) > 5, "a part of it is from all over too"
    assert len({place % 20 for place in places}) > 10, "always the same of the twenty"
    assert [texts.index(text) for text in train] == sorted(set(range(1000)) - set(places))
    how = manifest["settings"]["source"]["validation"]
    assert (how["one_in"], how["seed"]) == (20, 0)
    assert verify(tmp_path / "out") == manifest["tokens"]


def test_the_seed_chooses_the_documents(tmp_path):
    write_lines(tmp_path / "a.jsonl", [f"{i} " * 20 for i in range(400)])
    for name, seed in {"a": 3, "b": 3, "c": 4}.items():
        prepare(tmp_path / "a.jsonl", tmp_path / name, f"--seed={seed}")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    both = [set(documents(tmp_path / name, "val")) for name in "ac"]
    assert len(both[0] & both[1]) < 10 < len(both[0])
    with pytest.raises(UserError, match="made with other settings"):
        prepare(tmp_path / "a.jsonl", tmp_path / "a", "--seed=4")


@pytest.mark.parametrize("files", [1, 7])
def test_a_few_long_files_are_drawn_in_parts_and_nothing_is_lost(tmp_path, files, monkeypatch):
    """Validation comes from all over the text, and both splits together are all of it."""
    monkeypatch.setattr(own_text, "CHUNK_CHARS", 10_000)  # many reads per file
    (tmp_path / "in").mkdir()
    texts = [words(i, 60_000 // files) for i in range(files)]
    for i, text in enumerate(texts):
        (tmp_path / "in" / f"{i}.txt").write_text(text)
    prepare(tmp_path / "in", tmp_path / "out", tokeniser="gpt2")
    tokeniser, whole = get_tokeniser("gpt2"), "".join(texts)
    places = {"val": [], "train": []}
    for split, found in places.items():
        for text in documents(tmp_path / "out", split, tokeniser):
            place = whole.index(text)
            found.append((place, place + len(text)))
        assert (found == sorted(found)) == (split == "train")
    runs = sorted(places["val"] + places["train"])
    assert runs[0][0] == 0
    assert runs[-1][1] == len(whole)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(runs))
    starts = [0, *sorted(start for start, _ in places["val"]), len(whole)]
    assert max(after - before for before, after in itertools.pairwise(starts)) < 0.2 * len(whole)
    size = sum(end - start for start, end in places["val"])
    assert 0.03 < size / len(whole) < 0.07


def test_a_text_without_blanks_is_split_too(tmp_path):
    text = "".join(random.Random(0).choices("ACGT", k=300_000))
    (tmp_path / "a.txt").write_text(text)
    prepare(tmp_path / "a.txt", tmp_path / "out")
    val, train = (documents(tmp_path / "out", split) for split in ("val", "train"))
    assert "".join(sorted(val + train, key=text.index)) == text
    assert 0.02 < sum(map(len, val)) / len(text) < 0.1


def test_val_tokens_is_about_what_comes_out(tmp_path):
    (tmp_path / "a.txt").write_text(words(0, 60_000))
    for asked in (1_000, 10_000, 100_000):
        tokens = prepare(tmp_path / "a.txt", tmp_path / str(asked), f"--val-tokens={asked}")
        assert asked * 0.7 < tokens["tokens"]["val"] < asked * 1.5
    with pytest.raises(UserError, match="--val-tokens 900000 is more than half of the text"):
        prepare(tmp_path / "a.txt", tmp_path / "x", "--val-tokens=900K")


def test_shard_0_is_validation_even_if_training_has_tokens_first(tmp_path, monkeypatch):
    monkeypatch.setattr("data.pipeline.CHUNK_CHARS", 100)
    monkeypatch.setattr(own_text.Sample, "holds", lambda self, number: number == 150)
    write_lines(tmp_path / "a.jsonl", [f"{i} " * 20 for i in range(400)])
    manifest = prepare(tmp_path / "a.jsonl", tmp_path / "out", "--shard-tokens=9K")
    names = [shard["name"] for shard in manifest["shards"]]
    assert names == ["text_val_000000.bin"] + [f"text_train_{i:06d}.bin" for i in range(1, 5)]
    assert documents(tmp_path / "out", "val") == ["150 " * 20]


def test_validation_of_several_shards_is_whole(tmp_path):
    (tmp_path / "a.txt").write_text(words(0, 9_000))
    manifest = prepare(tmp_path / "a.txt", tmp_path / "out", "--val-tokens=9K", "--shard-tokens=2K")
    assert sum(shard["split"] == "val" for shard in manifest["shards"]) > 3
    whole = (tmp_path / "a.txt").read_text()
    runs = [text for split in ("val", "train") for text in documents(tmp_path / "out", split)]
    assert "".join(sorted(runs, key=whole.index)) == whole
    assert verify(tmp_path / "out") == manifest["tokens"]
    assert not list((tmp_path / "out").glob("*.tmp"))


# --- hostile files -------------------------------------------------------------------------------

GOOD = [f"{i} good text. " * 3 for i in range(300)]


def in_good_company(tmp_path, name, data):
    (tmp_path / "in").mkdir(exist_ok=True)
    write_lines(tmp_path / "in" / "good.jsonl", GOOD)
    (tmp_path / "in" / name).write_bytes(data)
    return tmp_path / "in"


def parquet(**columns):
    file = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue().to_pybytes()


WHOLE_FILES = {
    "latin1.txt": (b"caf\xe9 au lait " * 99, "is not UTF-8 (byte 3)"),
    "late.txt": (b"fine words " * 300_000 + b"\xff" + b"more words " * 9, "is not UTF-8 (byte 33"),
    "cut.txt": (b"ends in the middle of \xe4\xb8", "is not UTF-8 (byte 22)"),
    "utf16.txt": ("some words".encode("utf-16"), "is not UTF-8 (byte 0)"),
    "cut.txt.gz": (gzip.compress(b"words " * 999_999)[:-9], "is damaged"),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "x"}\n' * 9_999)[:-9], "is damaged"),
    "sum.jsonl.gz": (gzip.compress(b'{"text": "x"}\n')[:-8] + bytes(8), "is damaged"),
    "plain.txt.gz": (b"not compressed", "is damaged: Not a gzipped file"),
    "fake.parquet": (b"PAR1 not really", "is not a parquet file"),
    "other.parquet": (parquet(body=["x"]), "has no column 'text'"),
    "ints.parquet": (parquet(text=[7, 8]), "has no text in 'text' but 7"),
}
LINES = {
    "half": b'{"text": "half',
    "number": b'{"text": 7}',
    "list of texts": b'{"text": ["a", "b"]}',
    "no field": b'{"body": "x"}',
    "no object": b'["text"]',
    "deep": b"[" * 100_000,
    "not UTF-8": b'{"text": "\xff"}',
    "an array over many lines": b"[",
    "NUL": b"\0\0\0",
}


@pytest.mark.parametrize("name", WHOLE_FILES)
def test_a_bad_file_is_refused_or_left_out_whole_and_listed(tmp_path, name, capsys):
    data, problem = WHOLE_FILES[name]
    folder = in_good_company(tmp_path, name, data)
    with pytest.raises(UserError) as error:
        prepare(folder, tmp_path / "refused")
    assert f"{name} {problem}" in str(error.value)
    assert "leave such files and lines out with --skip-bad" in str(error.value)
    manifest = prepare(folder, tmp_path / "out", "--skip-bad")
    found = documents(tmp_path / "out", "val") + documents(tmp_path / "out", "train")
    assert sorted(found) == sorted(GOOD), "nothing of the bad file, all of the good one"
    printed = capsys.readouterr().out
    assert "left out: files 1, lines 0" in printed
    assert f"{name} {problem}" in printed
    assert [(entry["file"], entry["lines"]) for entry in manifest["skipped"]] == [(name, 0)]


def test_what_follows_a_bad_parquet_file_is_read_and_can_be_continued(tmp_path, monkeypatch):
    """The next chunk asked the stream that was left out where it had got to."""
    monkeypatch.setattr("data.pipeline.CHUNK_CHARS", 500)
    folder = in_good_company(tmp_path, "a.parquet", parquet(text=[7, 8]))
    manifest = prepare(folder, tmp_path / "out", "--skip-bad")
    found = documents(tmp_path / "out", "val") + documents(tmp_path / "out", "train")
    assert sorted(found) == sorted(GOOD)
    assert [(entry["file"], entry["lines"]) for entry in manifest["skipped"]] == [("a.parquet", 0)]


def test_bad_lines_are_left_out_one_by_one_and_counted(tmp_path, capsys):
    lines = [line for bad in LINES.values() for line in (bad, b'{"text": "a good line"}', b"")]
    folder = in_good_company(tmp_path, "bad.jsonl", b"\n".join(lines))
    manifest = prepare(folder, tmp_path / "out", "--skip-bad")
    found = documents(tmp_path / "out", "val") + documents(tmp_path / "out", "train")
    assert sorted(found) == sorted([*GOOD, *["a good line"] * len(LINES)])
    assert f"left out: files 0, lines {len(LINES)}" in capsys.readouterr().out
    (entry,) = manifest["skipped"]
    assert (entry["file"], entry["lines"]) == ("bad.jsonl", len(LINES))
    assert entry["what"].startswith("at byte 0: not JSON")


def test_when_everything_is_bad_the_list_comes_before_the_refusal(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(b'{"body": "x"}\n' * 30)
    with pytest.raises(UserError, match="the source holds no text"):
        prepare(tmp_path / "a.jsonl", tmp_path / "out", "--skip-bad")
    assert "lines 30" in capsys.readouterr().out


def test_marks_line_ends_zeros_and_empty_files_are_kept_or_passed_as_they_are(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "bom.txt").write_bytes(b"\xef\xbb\xbfa mark in front and \xef\xbb\xbf inside")
    (folder / "bom.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a mark before JSON"}\r\n')
    (folder / "crlf.txt").write_bytes(b"one\r\ntwo\rthree\n")
    (folder / "nul.txt").write_bytes(b"a\0b\0\0c")
    (folder / "empty.txt").write_bytes(b"")
    (folder / "mark.txt").write_bytes(b"\xef\xbb\xbf")
    (folder / "empty.jsonl").write_bytes(b"\n\r\n  \n")
    (folder / "empty.txt.gz").write_bytes(gzip.compress(b""))
    (folder / "text.txt").write_text(words(0, 2_000))
    for name, options in {"plain": (), "skipping": ("--skip-bad",)}.items():
        manifest = prepare(folder, tmp_path / name, *options)
        found = documents(tmp_path / name, "val") + documents(tmp_path / name, "train")
        assert {"a mark in front and \ufeff inside", "a mark before JSON",
                "one\r\ntwo\rthree\n", "a\0b\0\0c"} <= set(found)  # fmt: skip
        assert "" not in found
        assert "skipped" not in manifest
    shards = {n: data for n, data in contents(tmp_path / "plain").items() if n.endswith(".bin")}
    assert shards.items() <= contents(tmp_path / "skipping").items()


def test_memory_is_bounded_by_the_reads_not_by_the_file(tmp_path):
    """A bad byte at the end of a long stream, a text without blanks, a line without an end."""
    block = b"x" * 99 + b" "
    cases = {
        "late.txt": (block * 400_000 + b"\xff", 20e6),
        "solid.txt": (b"x" * 40_000_000, 80e6),
    }
    for name, (data, most) in cases.items():
        (tmp_path / name).write_bytes(data)
        source = own_text.TextSource([tmp_path / name], "text", {}, skip_bad=True)
        tracemalloc.start()
        size = sum(len(piece.text) for group in source.pieces(None) for piece in group)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert size == (0 if name == "late.txt" else len(data))
        assert peak < most, name
        assert bool(source.skipped) == (name == "late.txt")


def test_a_line_that_never_ends_is_bad_not_a_full_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(own_text, "LONGEST_LINE", 1_000)
    long = json.dumps({"text": "x" * 5_000}).encode()
    folder = in_good_company(tmp_path, "long.jsonl", long + b'\n{"text": "after it"}\n')
    with pytest.raises(UserError, match=r"line at byte 0: is longer than 1,000 bytes"):
        prepare(folder, tmp_path / "refused")
    manifest = prepare(folder, tmp_path / "out", "--skip-bad")
    found = documents(tmp_path / "out", "val") + documents(tmp_path / "out", "train")
    assert sorted(found) == sorted([*GOOD, "after it"])
    assert [(entry["file"], entry["lines"]) for entry in manifest["skipped"]] == [("long.jsonl", 1)]


def test_a_file_that_is_left_out_is_not_counted(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/good.txt").write_text(words("good", 500))
    (tmp_path / "in/bad.txt").write_bytes(b"caf\xe9")
    prepare(tmp_path / "in", tmp_path / "out", "--skip-bad")
    assert ": 1 file, " in capsys.readouterr().out


# --- which files are text ------------------------------------------------------------------------


def test_any_utf_8_file_is_text_and_what_is_left_out_is_listed(tmp_path, capsys):
    folder = tmp_path / "in"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "config").write_text("hidden")
    kept = {"a.md": "# Zürich", "b.rst": "title", "c.py": "x = 1", "d.html": "<p>", "LICENSE": "e"}
    for name, text in kept.items():
        (folder / name).write_text(f"{text} {words(name, 50)}")
    (folder / "f.md.gz").write_bytes(gzip.compress(b"compressed words"))
    (folder / "photo.png").write_bytes(b"\x89PNG\0\0")
    (folder / "old.html").write_bytes(b"caf\xe9")
    (folder / "late.csv").write_bytes(b"words " * 400_000 + b"\xff")
    os.mkfifo(folder / "pipe.txt")
    (folder / "zero.txt").symlink_to("/dev/zero")
    manifest = prepare(folder, tmp_path / "out", "--max-tokens=9M")
    printed = capsys.readouterr().out
    left_out = {entry["file"]: entry["what"] for entry in manifest["skipped"]}
    assert left_out == {
        ".git": "is hidden",
        "photo.png": "is not text (it has zero bytes)",
        "old.html": "is not UTF-8 text",
        "late.csv": "is not UTF-8 text",
        "pipe.txt": "is not a regular file",
        "zero.txt": "is not a regular file",
    }
    assert "left out: files 6, lines 0" in printed
    assert all(f"{folder / name} {why}" in printed for name, why in left_out.items())
    found = documents(tmp_path / "out", "val") + documents(tmp_path / "out", "train")
    assert f"6 files, {len(found)} documents, " in printed
    assert sum(map(len, found)) == sum(len((folder / n).read_text()) for n in kept) + 16


def test_a_pipe_or_a_device_that_is_named_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    for path in (tmp_path / "pipe.txt", "/dev/zero"):
        with pytest.raises(UserError, match="is not a regular file"):
            prepare(path, tmp_path / "out")
        with pytest.raises(UserError, match="is not a"):
            main(["fineweb", "--from-files", str(path), "--out", str(tmp_path / "out")])


def test_the_american_spelling_is_understood(tmp_path):
    (tmp_path / "a.txt").write_text(words(0, 500))
    arguments = ["text", str(tmp_path / "a.txt"), "--tokenizer=bytes", "--out"]
    main([*arguments, str(tmp_path / "out")])
    assert json.loads((tmp_path / "out/manifest.json").read_text())["tokeniser"] == "bytes"
