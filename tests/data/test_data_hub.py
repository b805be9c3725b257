"""The hub's sources through its own client, against a hub on this machine."""

import io
import os

import pyarrow
import pyarrow.parquet
import pytest
from data_sets import REPOSITORY, contents, run_prepare, write_shard
from hub_server import COMMIT, Hub

from data.prepare import main
from data.shards import open_split, read_manifest, verify

README = b"""---
configs:
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
---
"""


@pytest.fixture
def against(tmp_path):
    """Run prepare.py with a given hub; nothing is read from or left in the user's own cache."""

    def run(hub, *arguments):
        environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}
        return run_prepare(*arguments, env=environment)

    assert (REPOSITORY / "data").is_dir()
    return run


def parquet_files():
    files = {}
    for part in range(3):
        table = pyarrow.table({"text": [f"{part}.{i} some web page " * 40 for i in range(50)]})
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(table, buffer, row_group_size=20)
        files[f"sample/10BT/{part:03d}_00000.parquet"] = buffer.getvalue()
    return files


def test_fineweb_is_streamed_pinned_and_continued_after_a_failure(tmp_path, against):
    files = parquet_files()
    names = list(files)
    for name, data in files.items():
        (tmp_path / name.rsplit("/", 1)[-1]).write_bytes(data)
    main(["fineweb", "--from-files", f"{tmp_path}/*.parquet", "--shard-tokens=5000", "--workers=0",
          "--out", str(tmp_path / "local")])  # fmt: skip
    expected = {n: d for n, d in contents(tmp_path / "local").items() if n.endswith(".bin")}

    out = tmp_path / "out"
    command = ["fineweb", "--shard-tokens=5000", "--workers=0", "--out", out]
    damaged = files | {names[2]: files[names[2]][:-4] + b"gone"}
    with Hub({"HuggingFaceFW/fineweb": {"README.md": README, **damaged}}) as hub:
        failed = against(hub, *command)
    assert failed.returncode == 2
    assert failed.stderr.splitlines()[-1].startswith("error: cannot read HuggingFaceFW/fineweb: ")
    assert "Traceback" not in failed.stderr

    with Hub({"HuggingFaceFW/fineweb": {"README.md": README, **files}}) as hub:
        done = against(hub, *command)
        assert done.returncode == 0, done.stderr
    finished = contents(out)
    assert COMMIT in finished.pop("manifest.json").decode()
    assert finished == expected


def test_ready_made_shards_are_downloaded_checked_and_kept(tmp_path, against):
    names = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in (1, 2, 3))]
    for i, name in enumerate(names):
        write_shard(tmp_path / name, [50256, i, i + 1, 50256, 7])
    files = {name: (tmp_path / name).read_bytes() for name in names}
    out = tmp_path / "out"
    command = ["download", "fineweb", "--shards=2", "--out", out]
    with Hub({"kjj0/fineweb10B-gpt2": {"README.md": b"shards", **files}}) as hub:
        done = against(hub, *command)
        assert done.returncode == 0, done.stderr
        assert contents(out).keys() == {*names[:3], "manifest.json"}
        assert verify(out) == {"val": 5, "train": 10}
        manifest = read_manifest(out)
        assert manifest["settings"]["source"]["revision"] == COMMIT, "pinned to one commit"
        assert manifest["encoders"] is None, "who knows what wrote them"
        assert all(COMMIT in r for r in hub.requests if "resolve" in r or "tree" in r)
        assert open_split(out, "train", vocab_size=50304).tokeniser == "gpt2"

        (out / names[1]).write_bytes(files[names[1]][:-1])
        hub.requests.clear()
        assert against(hub, *command).returncode == 0
        fetched = {request.rsplit("/", 1)[-1] for request in hub.requests if "resolve" in request}
        assert fetched == {names[1]}, "the damaged one again, and only that"
        assert verify(out) == {"val": 5, "train": 10}


def test_a_ready_made_shard_that_is_not_one_is_refused(tmp_path, against):
    write_shard(tmp_path / "x.bin", [1, 2, 3], magic=20240801)
    files = {"fineweb_val_000000.bin": (tmp_path / "x.bin").read_bytes()}
    with Hub({"kjj0/fineweb10B-gpt2": files}) as hub:
        done = against(hub, "download", "fineweb", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "fineweb_val_000000.bin is not an llm.c version-1 GPT-2 shard" in done.stderr
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_no_hub_is_one_line_that_says_what_to_do(tmp_path, against):
    with Hub({}) as hub:
        for command, advice in (
            (["fineweb"], "--from-files 'folder/*.parquet'"),
            (["download", "fineweb"], "rerun the same command"),
        ):
            done = against(hub, *command, "--out", tmp_path / command[0])
            assert done.returncode == 2
            assert advice in done.stderr.splitlines()[-1]
            assert "Traceback" not in done.stderr
