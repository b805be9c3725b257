"""Shards: the format to the byte, borders invisible, every kind of damage named in one line."""

import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from cases import cases
from data_sets import contents, read_stream, write_set, write_shard
from hypothesis import given, settings
from hypothesis import strategies as st

from data.prepare import main
from data.shards import describe_set, header_bytes, open_split, read_manifest, verify
from lssar.errors import UserError
from support.files import sha256_of

LINE = "Ünïcode and plain text, line by line.\n"
STREAM = np.random.default_rng(5).integers(0, 50257, 5000, dtype=np.uint16)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Prepare a small set of bytes with a manifest: 1 validation and 3 training shards."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text(LINE * 100)
    out = folder / "set"
    main(["text", str(folder / "a.txt"), "--tokeniser=bytes", "--shard-tokens=1300",
          "--val-tokens=700", "--out", str(out)])  # fmt: skip
    return out


@pytest.fixture
def prepared(pristine, tmp_path):
    out = tmp_path / "set"
    out.mkdir()
    for name, data in contents(pristine).items():
        (out / name).write_bytes(data)
    return out


def refuses(folder, match, split="train", **options):
    with pytest.raises(UserError, match=match) as caught:
        open_split(folder, split, **options)
    assert "\n" not in str(caught.value)


def edit_manifest(folder, change):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("sha256", None)  # by hand, or by an attacker: nothing vouches for it
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def refuses_manifest(folder, change):
    """Check that the set is refused with its manifest changed, and restore the manifest."""
    sound = (folder / "manifest.json").read_bytes()
    edit_manifest(folder, change)
    refuses(folder, r"manifest\.json is damaged")
    (folder / "manifest.json").write_bytes(sound)


def test_the_header_is_llm_c_s():
    header = np.frombuffer(header_bytes(12345), dtype="<i4")
    assert header[:3].tolist() == [20240520, 1, 12345]
    assert len(header) == 256
    assert not header[3:].any()


@given(
    cuts=st.lists(st.integers(0, 5000), max_size=6),
    start=st.integers(0, 5000),
    count=st.integers(0, 5000),
)
@settings(max_examples=60, deadline=None)
def test_slices_do_not_see_shard_borders(cuts, start, count):
    count = min(count, 5000 - start)
    with tempfile.TemporaryDirectory() as folder:
        write_set(Path(folder), train=np.split(STREAM, sorted(cuts)))
        tokens = open_split(folder, "train")
        assert tokens.total_tokens == 5000
        got = tokens.slice(start, count)
        assert got.dtype == np.uint16
        assert np.array_equal(got, STREAM[start : start + count])


def test_a_slice_outside_the_split_is_an_error(tmp_path):
    write_set(tmp_path, train=[STREAM])
    tokens = open_split(tmp_path, "train")
    for start, count in ((-1, 2), (4999, 2), (0, 5001), (3, -1)):
        with pytest.raises(IndexError):
            tokens.slice(start, count)


@pytest.mark.parametrize("prefix", ["fineweb", "edu_fineweb", "my.set-2"])
def test_ready_made_sets_open_under_any_prefix(tmp_path, prefix):
    write_set(tmp_path, val=[STREAM[:7]], train=[STREAM[7:40], STREAM[40:]], prefix=prefix)
    assert np.array_equal(open_split(tmp_path, "val").slice(0, 7), STREAM[:7])
    train = open_split(tmp_path, "train", vocab_size=50304)
    assert np.array_equal(train.slice(0, 4993), STREAM[7:])
    assert (train.tokeniser, train.vocab_size) == (None, 50304)


def test_a_prepared_set_knows_its_tokeniser(prepared):
    tokens = open_split(prepared, "train", vocab_size=257)
    assert (tokens.tokeniser, tokens.vocab_size, tokens.directory) == ("bytes", 257, prepared)
    found, manifest = verify(prepared), read_manifest(prepared)
    assert found == manifest["tokens"]
    assert sum(found.values()) == len((LINE * 100).encode()) + manifest["documents"]


def test_a_shard_is_hashed_when_it_is_first_seen_and_again_when_it_looks_different(
    prepared, monkeypatch
):
    """With flipped tokens, training and evaluation went on and recorded the manifest's hash."""
    hashed = []
    monkeypatch.setattr(
        "data.checked.sha256_of", lambda path: hashed.append(path.name) or sha256_of(path)
    )
    monkeypatch.setattr("data.checked.TICK", -(10**9))  # as if the files were older than that
    names = sorted(path.name for path in prepared.glob("*_train_*.bin"))
    assert len(names) == 3
    for expected in (names, []):  # remembered, from one opening to the next
        hashed.clear()
        open_split(prepared, "train")
        assert hashed == expected
    with (prepared / ".checked.jsonl").open("a") as file:
        file.write('{"name": "text_tr')  # a kill
    shard = prepared / names[1]
    before = shard.stat()
    sound = shard.read_bytes()
    for damaged in (sound[:-2] + b"\x07\0", sound):
        shard.write_bytes(damaged)
        os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))  # as if untouched
        hashed.clear()
        if damaged != sound:
            refuses(
                prepared, rf"{names[1]} is damaged: its sha256 is \w+\.\.\., manifest\.json says"
            )
        else:
            open_split(prepared, "train")
        assert hashed == [names[1]]
    verify(prepared)


def test_a_link_in_place_of_what_is_remembered_is_not_followed(prepared, monkeypatch):
    monkeypatch.setattr("data.checked.TICK", -(10**9))
    (prepared / ".checked.jsonl").symlink_to(prepared / "elsewhere")  # not written through either
    open_split(prepared, "train")
    assert not (prepared / "elsewhere").exists()


def test_a_shard_of_this_instant_is_hashed_again(prepared):
    """It could change once more without another time."""
    open_split(prepared, "train")
    assert not (prepared / ".checked.jsonl").exists()


def test_thousands_of_shards_need_few_descriptors(tmp_path):
    for index in range(3_000):
        write_shard(tmp_path / f"x_train_{index:06d}.bin", [index % 7, index % 50257])
    tokens = open_split(tmp_path, "train")
    before = len(list(Path("/proc/self/fd").iterdir()))
    whole = tokens.slice(0, 6_000)
    assert whole[::2].tolist() == [i % 7 for i in range(3_000)]
    assert len(list(Path("/proc/self/fd").iterdir())) - before < 200


def test_a_truncated_shard_is_named(tmp_path):
    write_set(tmp_path, train=[STREAM, STREAM])
    path = tmp_path / "x_train_000001.bin"
    for size in (0, 12, 1023, 1024, 1025, 11_023):
        data = path.read_bytes()
        path.write_bytes(data[:size])
        refuses(tmp_path, r"x_train_000001\.bin is (truncated|damaged)")
        path.write_bytes(data)
    with path.open("ab") as file:
        file.write(b"\0")
    refuses(tmp_path, r"x_train_000001\.bin is damaged: .*11024 bytes\) but it has 11025")


def test_a_foreign_shard_is_named(tmp_path):
    foreign = {"magic": 20240801, "version": 7}
    for header in cases([foreign, {"version": 2}, {"magic": 0}, {"count": -1}, {"count": 9}]):
        write_shard(tmp_path / "x_train_000000.bin", STREAM, **header)
        refuses(tmp_path, r"x_train_000000\.bin is (not an llm\.c version-1|damaged)")


def test_tokens_outside_the_vocabulary_are_named(tmp_path):
    write_set(tmp_path, train=[[1, 2], [3, 50257, 4]])
    refuses(tmp_path, r"x_train_000001\.bin holds token 50257, outside .* 50257", vocab_size=50257)
    with pytest.raises(UserError, match=r"x_train_000001\.bin holds token 50257"):
        verify(tmp_path)


def test_another_tokeniser_s_set_is_refused(prepared):
    for vocab_size in cases([256, 50257, 50304]):
        said = rf"tokenised with 'bytes' \(257 ids\) .* {vocab_size}"
        refuses(prepared, said, vocab_size=vocab_size)


def test_both_ways_out_of_another_tokeniser_s_set_are_named(prepared):
    train = "train the model with --model.tokeniser=bytes"
    refuses(prepared, f"{train}, or prepare the text with --tokeniser gpt2$", vocab_size=50304)
    refuses(prepared, f"{train}, or choose other data$", vocab_size=7003)


def test_missing_things_are_named(tmp_path, prepared):
    refuses(tmp_path / "nowhere", "nowhere does not exist")
    (tmp_path / "empty").mkdir()
    refuses(tmp_path / "empty", "has no token shards; make some with")
    only = tmp_path / "only"
    only.mkdir()
    write_set(only, train=[STREAM])
    refuses(only, "no val shards", split="val")
    (prepared / "text_train_000002.bin").unlink()
    refuses(prepared, r"text_train_000002\.bin is missing, though manifest\.json lists it")


def test_a_file_in_place_of_the_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    refuses(tmp_path / "file", "cannot read .*file: Not a directory")


def test_strange_sets_are_refused(tmp_path, prepared):
    write_shard(prepared / "text_train_000009.bin", [1])
    refuses(prepared, r"text_train_000009\.bin is not in manifest\.json")
    gap = tmp_path / "gap"
    gap.mkdir()
    write_set(gap, train=[STREAM] * 4)
    (gap / "x_train_000002.bin").unlink()
    refuses(gap, r"between x_train_000001\.bin and x_train_000003\.bin")
    write_shard(gap / "y_train_000004.bin", STREAM)
    refuses(gap, "mixes shards of two sets")
    twice = tmp_path / "twice"
    twice.mkdir()
    write_set(twice, train=[STREAM], val=[])
    write_shard(twice / "x_val_000000.bin", STREAM)
    refuses(twice, "two shards of one number")


def test_a_manifest_s_names_cannot_leave_the_folder(prepared):
    examples = [
        "../x_train_000001.bin",
        "/etc/x_train_000001.bin",
        ".x_train_000001.bin",
        "a/b_train_0.bin",
        "x_train_000001.bin\n",
        "x_train_1.bin.tmp",
        "",
        7,
        None,
    ]
    for name in cases(examples):
        refuses_manifest(prepared, lambda m, name=name: m["shards"][1].update(name=name))


def test_a_damaged_manifest_is_named(prepared):
    examples = [
        lambda m: m.update(tokeniser="other"),
        lambda m: m.update(vocab_size=258),
        lambda m: m.update(shards={}) or m.pop("documents"),
        lambda m: m["shards"][0].update(tokens="700"),
        lambda m: m["shards"][0].update(tokens=-1),
        lambda m: m["shards"][0].update(sha256="0" * 63),
        lambda m: m["shards"][0].update(sha256=None),
        lambda m: m["shards"][0].update(extra=1),
        lambda m: m["shards"][0].update(split="train"),
        lambda m: m["shards"].append(m["shards"][0]),
        lambda m: m.update(settings=[]),
        lambda m: m["settings"].update(source="stdlib"),
    ]
    for change in cases(examples):
        refuses_manifest(prepared, change)


@given(text=st.binary(max_size=60) | st.sampled_from([b"[" * 5000, b"null", b'{"shards": 3}']))
@settings(max_examples=60, deadline=None)
def test_any_bytes_for_a_manifest_give_one_line(text):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "manifest.json").write_bytes(text)
        with pytest.raises(UserError, match=r"manifest\.json is damaged"):
            read_manifest(Path(folder))


def test_counts_that_disagree_with_the_manifest_are_refused(prepared):
    tokens = read_stream(prepared, "train")[:99]
    write_shard(prepared / "text_train_000001.bin", tokens)
    refuses(prepared, r"text_train_000001\.bin has 99 tokens, manifest\.json says 1300")


def test_verify_finds_any_flipped_bit(prepared):
    for path in sorted(prepared.glob("*.bin")):
        sound = path.read_bytes()
        for place in (0, 9, 800, 1024, 1500, len(sound) - 1):
            damaged = bytearray(sound)
            damaged[place] ^= 4
            path.write_bytes(damaged)
            with pytest.raises(UserError, match=path.name):
                verify(prepared)
        path.write_bytes(sound)
    verify(prepared)
    edit_manifest(prepared, lambda manifest: manifest.update(documents=2))
    with pytest.raises(UserError, match=r"1 documents, manifest\.json says 2"):
        verify(prepared)


def test_verify_is_a_command(prepared, capsys):
    main(["verify", str(prepared)])
    found = "is sound: {train:,} training tokens, {val:,} validation tokens"
    found = found.format(**read_manifest(prepared)["tokens"])
    assert capsys.readouterr().out.endswith(f"{found}\n")
    (prepared / "manifest.json").unlink()  # with it goes what the contents should be
    main(["verify", str(prepared)])
    assert f"{found}; no manifest.json" in capsys.readouterr().out


def test_an_unfinished_set_is_not_trained_on(prepared):
    (prepared / "progress.json").write_text("{}")
    refuses(prepared, "is unfinished")


@pytest.mark.parametrize("hidden", ["file", "folder"])
def test_no_permission_is_one_line(tmp_path_factory, hidden):
    folder = Path(tempfile.mkdtemp())
    write_set(folder, train=[STREAM])
    folder.chmod(0 if hidden == "folder" else 0o755)
    (folder / "x_train_000000.bin").chmod(0) if hidden == "file" else None
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        refuses(folder, "cannot read .*: Permission denied")
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def test_a_set_is_described_by_its_shards_and_its_source(prepared, tmp_path):
    described = describe_set(prepared)
    assert described["data"] == str(prepared)
    assert described["source"] == "text"
    edit_manifest(prepared, lambda m: m.update(encoders=["another"]))
    again = describe_set(prepared)
    assert again["tokens_sha256"] == described["tokens_sha256"]
    assert again["manifest_sha256"] != described["manifest_sha256"]
    edit_manifest(prepared, lambda m: m["shards"][2].update(sha256="0" * 64))
    assert describe_set(prepared)["tokens_sha256"] != described["tokens_sha256"]
    edit_manifest(prepared, lambda m: m.pop("settings"))
    assert describe_set(prepared)["source"] is None
    write_set(tmp_path, train=[STREAM])
    assert set(describe_set(tmp_path).values()) == {str(tmp_path), None}
