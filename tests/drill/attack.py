"""What an attack is: a function that does it so many times, asserts, and tells what happened.

    @attack("crashes", "training, killed at random instants", full=60, short=4)
    def training(times: int, folder: Path) -> Told: ...

`full` is how often the drill does it, `short` how often the normal test suite does (0: not at
all). An AssertionError, or anything else raised, is a failure and becomes part of the record.
"""

import resource
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

GROUPS = {
    "crashes": "Crashes",
    "storage": "Storage",
    "input": "Input",
    "numbers": "Numbers",
    "security": "Security",
    "places": "Places and users",
    "load": "Load",
}


def memory() -> Path | None:
    """Return a memory disk with room: the order of writes is attacked, not the disk's speed."""
    place = Path("/dev/shm")
    return place if place.is_dir() and shutil.disk_usage(place).free > 2**30 else None


@dataclass(frozen=True)
class Told:
    """Hold what an attack that did not fail has to say."""

    happened: str
    times: int  # how often it was really done
    kills: int = 0  # of which by kill -9
    figures: dict = field(default_factory=dict)  # measurements, for the JSON


@dataclass(frozen=True)
class Outcome:
    """Hold one row of the table."""

    name: str
    group: str
    what: str
    times: int
    happened: str
    passed: bool
    seconds: float
    computing: float  # seconds of it, of all processes: the same on a loaded machine
    kills: int = 0
    figures: dict = field(default_factory=dict)

    def to_dict(self) -> dict:
        return asdict(self)


def computing() -> float:
    """Return the CPU seconds so far of this process and of those it has seen end."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in usages)


@dataclass(frozen=True)
class Attack:
    name: str
    group: str
    what: str
    full: int
    short: int
    function: Callable[[int, Path], Told]

    def run(self, times: int) -> Outcome:
        """Do it in a folder of its own, which goes with it."""
        folder = Path(tempfile.mkdtemp(prefix="drill-", dir=memory()))
        began, computed = time.monotonic(), computing()
        try:
            told = self.function(times, folder)
            fields = asdict(told) | {"passed": True}
        except Exception as error:  # whatever an attack breaks is its finding
            reason = str(error).strip() or traceback.format_exc(limit=-2)
            reason = " ".join([reason, *getattr(error, "__notes__", [])])
            fields = {"happened": f"{type(error).__name__}: {reason}", "passed": False}
            fields |= {"times": times}
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        fields["seconds"] = round(time.monotonic() - began, 1)
        fields["computing"] = round(computing() - computed, 1)
        return Outcome(self.name, self.group, self.what, **fields)


ATTACKS: dict[str, Attack] = {}


def attack(group: str, what: str, *, full: int, short: int = 0):
    """Register a function as an attack."""
    assert group in GROUPS

    def register(function: Callable[[int, Path], Told]):
        name = f"{group}-{function.__name__.replace('_', '-')}"
        assert name not in ATTACKS
        ATTACKS[name] = Attack(name, group, what, full, short, function)
        return function

    return register
