"""Asks the hub for the newest commit of a data set, and for ready-made llm.c shards."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from data.shards import SHARD_NAME, Shard, check_shard, count_documents
from data.tokeniser import Gpt2Tokeniser
from data.writer import recorded_settings, write_manifest
from lssar.errors import UserError, did_you_mean
from lssar.folders import ensure_hub_cache
from support.files import first_line, locked, sha256_of

READY_MADE = {
    "fineweb": "kjj0/fineweb10B-gpt2",
    "fineweb-edu": "karpathy/fineweb-edu-100B-gpt2-token-shards",
}
RERUN = "check network and disk space and rerun the same command: it continues"


def download(name: str, out: Path, train_shards: int | None) -> None:
    """Fetch the validation shard and the first `train_shards`; what is there already is kept."""
    if name not in READY_MADE:
        raise UserError(f"no ready-made shards of {name!r}; {did_you_mean(name, READY_MADE)}")
    repository = READY_MADE[name]
    shards = []
    with locked(out):
        revision = pinned_revision(out, repository, RERUN)
        where = {"repo_type": "dataset", "revision": revision, "local_dir": out}
        listing = _list_shards(repository, revision)
        training = [n for n in listing if SHARD_NAME.fullmatch(n)["split"] == "train"]
        wanted = [n for n in listing if n not in training] + training[:train_shards]
        for number, file in enumerate(wanted, start=1):
            print(f"{number}/{len(wanted)} {file}", flush=True)
            path = out / file
            sha256 = listing[file]
            if not path.exists() or sha256_of(path) != sha256:
                with _asking_hub(f"{repository}/{file}", RERUN) as hub:
                    hub.hf_hub_download(repository, file, **where, force_download=path.exists())
                if sha256_of(path) != sha256:
                    raise UserError(f"{path} arrived damaged (sha256); rerun the same command")
            split = SHARD_NAME.fullmatch(file)["split"]
            shards.append(Shard(file, split, check_shard(path), sha256))
        documents = sum(count_documents(out, shard, Gpt2Tokeniser) for shard in shards)
        source = {"kind": "download", "repository": repository, "revision": revision}
        write_manifest(out, Gpt2Tokeniser, shards, documents, {"source": source})
        shutil.rmtree(out / ".cache", ignore_errors=True)  # the client's notes on the download
    print(f"{out}: {len(shards)} shards, {sum(shard.tokens for shard in shards):,} tokens")


@contextlib.contextmanager
def _asking_hub(what: str, advice: str) -> Iterator[ModuleType]:
    """Yield the hub's client, and make one line of any error: they share no base class."""
    ensure_hub_cache()
    import huggingface_hub

    try:
        yield huggingface_hub
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"cannot fetch {what} from the hub ({why}); {advice}") from None


def pinned_revision(out: Path, repository: str, advice: str) -> str:
    """Return the commit that the set was begun with; for a new set, the newest."""
    if begun := (recorded_settings(out) or {}).get("source", {}).get("revision"):
        return begun
    with _asking_hub(repository, advice) as hub:
        return hub.HfApi().dataset_info(repository).sha


def _list_shards(repository: str, revision: str) -> dict[str, str]:
    """Return the commit's shards in order: name -> sha256."""
    with _asking_hub(repository, RERUN) as hub:
        tree = hub.HfApi().list_repo_tree(repository, repo_type="dataset", revision=revision)
        found = {file.path: file.lfs.sha256 for file in tree if getattr(file, "lfs", None)}
    matches = filter(None, map(SHARD_NAME.fullmatch, found))
    ordered = sorted(matches, key=lambda match: int(match["index"]))
    if not ordered:
        raise UserError(f"{repository} lists no shards on the hub")
    return {match.string: found[match.string] for match in ordered}
