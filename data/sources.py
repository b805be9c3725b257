"""Reads text from the hub's parquet streams and the standard library, or generates it.

A source has a `prefix` for its shards' names, a `description` for the manifest, `pieces(state)`
that starts or continues at a state and yields lists of pieces, `state()` after the last list (plain
JSON), and `expected_tokens(written)` of the whole when so many are written, None if not known. A
user's own files are in data/own_text.py.
"""

import contextlib
import gc
import hashlib
import importlib.metadata
import importlib.util
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from data.pipeline import Piece
from lssar.errors import UserError
from lssar.folders import ensure_hub_cache
from support.files import first_line, reading

# Samples with their size in GPT-2 tokens where known.
WEB = {"sample-10BT": 10_355_324_043}
EDU = {"sample-10BT": None, "sample-100BT": None}
HUB = {  # name: (repository, prefix of the shards, samples)
    "fineweb": ("HuggingFaceFW/fineweb", "fineweb", WEB),
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "edu_fineweb", EDU),
}


class Unusable(UserError):
    """Says what is wrong with a file, or with a line of it."""


class ParquetStream:
    """Reads the rows of a `datasets` stream; exactly resumable, released when closed."""

    def __init__(self, path: str, field: str, **arguments):
        self._path = path
        self._field = field
        self._arguments = arguments

    def texts(self, state: dict | None) -> Iterator[tuple[str, bool]]:
        ensure_hub_cache()
        try:
            import datasets

            datasets.utils.logging.set_verbosity_error()
            self._dataset = datasets.load_dataset(
                self._path,
                split="train",
                streaming=True,
                columns=[self._field],
                batch_size=1024,
                **self._arguments,
            )
            if state is not None:
                self._dataset.load_state_dict(state)
            with contextlib.closing(iter(self._dataset)) as rows:
                for row in rows:
                    text = row[self._field]
                    if not isinstance(text, str | None):
                        raise Unusable(f"has no text in {self._field!r} but {text!r:.40}")
                    if text:
                        yield text, True
        except Unusable:
            raise
        except Exception as error:  # readers and network clients below share no base class
            raise UserError(
                f"cannot read {self._arguments.get('data_files') or self._path}: "
                f"{first_line(error)}; rerun the same command to continue, or pass local copies "
                "with --from-files"
            ) from None
        finally:
            self._dataset = None
            rows = None
            gc.collect()  # a half-read parquet stream can crash the interpreter at exit

    def state(self) -> dict:
        return self._dataset.state_dict()


class HubSource(ParquetStream):
    """Streams FineWeb or FineWeb-Edu from the hub."""

    def __init__(self, name: str, sample: str, revision: str):
        repository, self.prefix, samples = HUB[name]
        super().__init__(repository, "text", name=sample, revision=revision)
        self._tokens = samples[sample]
        self.description = {"kind": name, "sample": sample, "revision": revision}

    def pieces(self, state: dict | None) -> Iterator[list[Piece]]:
        return ([Piece(text)] for text, _ in self.texts(state))

    def expected_tokens(self, written: int) -> int | None:
        return self._tokens


class NumberedSource:
    """Makes documents from their numbers: validation first, a separator, then training.

    The number `border` is the separator. It has no document.
    """

    SEED = 2**31  # of generated texts: not one that an evaluation would take

    def __init__(self, description: dict, documents: int, validation: int):
        self.prefix = description["kind"]
        self.description = description
        self.count = documents + 1  # with the separator
        self.border = validation
        self._next = 0

    def document(self, number: int) -> str:
        """Return the text of a document, perhaps empty."""
        raise NotImplementedError

    def pieces(self, state: list | None) -> Iterator[list[Piece]]:
        first = state[0] if state else 0
        for number in range(first, self.count):
            self._next = number + 1
            if number == self.border:
                continue
            if text := self.document(number):
                yield [Piece(text, validation=number < self.border)]

    def state(self) -> list:
        return [self._next]

    def expected_tokens(self, written: int) -> int:
        return written * self.count // self._next


class PythonSource(NumberedSource):
    """Reads Python sources of the installation: the standard library, or that and torch.

    They differ between versions, so the description names these and the hash of each file. Files
    are ordered by a hash of their names and a tenth of them is validation, so both splits are a
    fair sample of the whole from their first bytes on.
    """

    def __init__(self, kind: str):
        """Read the sources of `kind`: "stdlib", or "sources", which includes torch."""
        paths = _python_files(Path(sysconfig.get_paths()["stdlib"]), "")
        about = {"kind": kind, "python": platform.python_version()}
        if kind == "sources":
            paths |= _python_files(_torch_folder(), "torch/")
            about["torch"] = importlib.metadata.version("torch")
        names = sorted(paths, key=name_hash)
        validation = [name for name in names if name_hash(name) % 10 == 0]
        training = [name for name in names if name_hash(name) % 10 != 0]
        self.texts = {name: _python_source(paths[name]) for name in validation + training}
        files = {}
        for name, text in self.texts.items():
            split = "val" if name_hash(name) % 10 == 0 else "train"
            # Patch releases of Python differ in a few files: the hashes tell which.
            files[name] = {"split": split, "sha256": hashlib.sha256(text.encode()).hexdigest()}
        about["files"] = files
        super().__init__(about, len(names), len(validation))
        self._names = [*validation, None, *training]  # None: the separator

    def document(self, number: int) -> str:
        return self.texts[self._names[number]]


def _python_files(root: Path, prefix: str) -> dict[str, Path]:
    """Return the wanted sources below a folder by their name in the corpus."""
    found = [path.relative_to(root) for path in root.rglob("*.py")]
    names = [path.as_posix() for path in found if _wanted(path)]
    if not names:
        raise UserError(f"there are no Python sources in {root}; use the text source")
    return {prefix + name: root / name for name in names}


def _torch_folder() -> Path:
    """Find the installed torch without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None:
        raise UserError("torch is not installed, and its sources are part of this corpus")
    return Path(spec.origin).parent


def _wanted(path: Path) -> bool:
    """Return False for tests, installed packages and what the build generated for this machine."""
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "_bundled"}
    generated = path.name.startswith("_sysconfigdata") or path.as_posix() == "version.py"
    return not generated and not skipped.intersection(path.parts)


def name_hash(name: str) -> int:
    """Return 64 bits that depend on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])


def _python_source(path: Path) -> str:
    with reading(path), tokenize.open(path) as file:
        return file.read()
