"""Ready-made llm.c shards from the hub, of one commit, each checked against the hub's sha256."""

import shutil
from pathlib import Path

from data.shards import SHARD_NAME, Shard, check_shard, count_documents
from data.tokeniser import Gpt2Tokeniser
from data.writer import locked, recorded_settings, write_manifest
from lssar.cache import ensure_hub_cache
from lssar.errors import UserError, did_you_mean
from support.files import sha256_of

READY_MADE = {
    "fineweb": "kjj0/fineweb10B-gpt2",
    "fineweb-edu": "karpathy/fineweb-edu-100B-gpt2-token-shards",
}


def download(name: str, out: Path, train_shards: int | None) -> None:
    """Fetch the validation shard and the first `train_shards` (default all); write a manifest.

    Files already there with the right sha256 are kept, so an interrupted download continues. A
    complete set stays with the commit that its manifest names.
    """
    if name not in READY_MADE:
        raise UserError(f"no ready-made shards of {name!r}; {did_you_mean(name, READY_MADE)}")
    if train_shards is not None and train_shards < 1:
        raise UserError(f"--shards {train_shards} must be at least 1")
    repository = READY_MADE[name]
    with locked(out):
        begun = (recorded_settings(out) or {}).get("source", {})
        revision, listing = _list_hub(repository, begun.get("revision"))
        training = [n for n in listing if SHARD_NAME.fullmatch(n)["split"] == "train"]
        wanted = [n for n in listing if n not in training] + training[:train_shards]
        shards = []
        for number, file in enumerate(wanted, start=1):
            print(f"{number}/{len(wanted)} {file}", flush=True)
            shards.append(_fetch(repository, revision, file, out, *listing[file]))
        documents = sum(count_documents(out, shard, Gpt2Tokeniser) for shard in shards)
        source = {"kind": "download", "repository": repository, "revision": revision}
        settings = {"source": source}
        write_manifest(out, Gpt2Tokeniser, shards, documents, settings)
        shutil.rmtree(out / ".cache", ignore_errors=True)  # the client's notes on the download
    print(f"{out}: {len(shards)} shards, {sum(shard.tokens for shard in shards):,} tokens")


def _list_hub(repository: str, revision: str | None) -> tuple[str, dict[str, tuple[int, str]]]:
    """The commit (the newest, if none is given) and its shards: name -> (bytes, sha256)."""
    ensure_hub_cache()
    from huggingface_hub import HfApi

    try:
        revision = revision or HfApi().dataset_info(repository).sha
        tree = HfApi().list_repo_tree(repository, repo_type="dataset", revision=revision)
        files = list(tree)
    except Exception as error:  # the client's errors share no base class across its versions
        raise _unreachable(repository, error) from None
    found = {
        file.path: (file.lfs.size, file.lfs.sha256)
        for file in files
        if SHARD_NAME.fullmatch(file.path) and getattr(file, "lfs", None)
    }
    if not found:
        raise UserError(f"{repository} lists no shards on the hub")
    by_index = sorted(found.items(), key=lambda i: int(SHARD_NAME.fullmatch(i[0])["index"]))
    return revision, dict(by_index)


def _fetch(repository: str, revision: str, name: str, out: Path, size: int, sha256: str) -> Shard:
    path = out / name
    if not (path.exists() and path.stat().st_size == size and sha256_of(path) == sha256):
        from huggingface_hub import hf_hub_download

        try:
            hf_hub_download(
                repository,
                name,
                repo_type="dataset",
                revision=revision,
                local_dir=out,
                force_download=path.exists(),
            )
        except Exception as error:  # as above
            raise _unreachable(f"{repository}/{name}", error) from None
        if sha256_of(path) != sha256:
            raise UserError(f"{path} arrived damaged (sha256); run the same command again")
    tokens = check_shard(path)
    return Shard(name, SHARD_NAME.fullmatch(name)["split"], tokens, sha256)


def _unreachable(what: str, error: Exception) -> UserError:
    reason = (str(error).strip().splitlines() or [""])[0]
    return UserError(
        f"cannot fetch {what} from the hub ({type(error).__name__}: {reason}); check network and "
        "disk space and run the same command again: it continues"
    )
