"""Builds the CPU kernel `lssar_cpu.cpp` with the system's C++ compiler, once per machine.

A wheel for Linux on x86-64 has the kernel inside (`setup.py`), and nothing is compiled. Otherwise
the library is kept in a cache folder: $LSSAR_CACHE, else $XDG_CACHE_HOME/lssar, else
~/.cache/lssar. From there it is used on machines without a compiler too. A folder or a library
that another user can write is not used: the kernel is then built in a private temporary folder,
with a notice.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from lssar.folders import check_trusted, private_folder
from lssar.mechanisms import FLAT

SOURCE = Path(__file__).with_name("lssar_cpu.cpp")
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC")
CONSTANTS = (f"-DLSSAR_FLAT={FLAT}f",)
# Tried in this order: an Arm clang knows only -mcpu, and some compilers come without OpenMP.
VARIANTS = (
    ("-march=native", "-fopenmp"),
    ("-mcpu=native", "-fopenmp"),
    ("-march=native",),
    ("-mcpu=native",),
    (),
)
# The kernels of a wheel, best first: flags of the compiler, and what the processor has to have.
SHIPPED = {
    "avx512": (
        ("-march=x86-64-v4", "-fopenmp"),
        {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    ),
    "avx2": (("-march=x86-64-v3", "-fopenmp"), {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"}),
}
SECONDS = 15  # of a compilation, about
UNFINISHED = "build-"  # folders of a build that is going on, or was killed


class Unavailable(RuntimeError):
    """Says in one line why the kernel cannot be built or loaded here."""


def build(*extra: str) -> Path:
    """Return the shared library for this machine: the wheel's, or the cache's, or compiled now."""
    chosen = os.environ.get("CXX", "")
    if not (chosen or extra) and (library := _shipped()):
        return library
    name = _library_name(chosen, extra)
    problems = []
    for place in (_cache_folder, private_folder):
        try:
            folder = place()
            library = _find(folder, name) or _build_in(folder, name, _compiler(chosen), extra)
        except OSError as error:
            problems.append(str(error))
            continue
        if problems:
            warnings.warn(
                f"the built CPU kernel is kept in {folder}, as its cache folder cannot be used "
                f"({problems[0]}); set LSSAR_CACHE to a folder that only you can write",
                stacklevel=2,
            )
        return library
    raise Unavailable(
        f"no folder can keep the built kernel ({'; '.join(problems)}); set LSSAR_CACHE to one"
    )


def shipped_path(variant: str) -> Path:
    """Return where a wheel has its kernel for this variant."""
    return SOURCE.with_name(f"lssar_cpu-{variant}.so")


def _shipped() -> Path | None:
    """Return the best of the wheel's kernels that this processor and this system can load."""
    for variant, (_, needed) in SHIPPED.items():
        library = shipped_path(variant)
        if library.exists() and needed <= _cpu_flags() and _loads(library):
            return library
    return None


def _loads(library: Path) -> bool:
    try:
        ctypes.CDLL(str(library))
    except OSError:  # as where the OpenMP runtime is missing
        return False
    return True


def _compiler(chosen: str) -> list[str]:
    """Return the compiler's command: $CXX, or the first that is found."""
    try:
        command = shlex.split(chosen)
    except ValueError as error:
        raise Unavailable(f"CXX = {chosen!r} is not a command: {error}; correct it") from None
    if command:
        return command
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    raise Unavailable("no C++ compiler found (looked for $CXX, c++, g++, clang++)")


def _run(command: list[str]) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace")
    except (OSError, ValueError) as error:  # ValueError: a null character
        raise Unavailable(f"cannot run the C++ compiler {command[0]}: {error}") from None


def _library_name(chosen: str, extra: tuple[str, ...]) -> str:
    """Return a name that changes with the sources, the flags, the processor and $CXX.

    It does not depend on the compiler that is found: one that was removed or updated is not needed.
    """
    sources = [path.read_text() for path in (SOURCE, *sorted(SOURCE.parent.glob("cpu_*.h")))]
    flags = repr((chosen, FLAGS, CONSTANTS, VARIANTS, extra))
    parts = [*sources, flags, _cpu_features()]
    return f"lssar_cpu-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}"


def _cpu_features() -> str:
    """Describe the processor, on which -march=native depends: machines may share a cache."""
    found = {x for x in _cpu_info() if x.startswith(("model name", "flags", "Features"))}
    return "\n".join([platform.machine(), platform.processor(), *sorted(found)])


def _cpu_flags() -> set[str]:
    """Return the instruction sets that Linux names for this processor."""
    lines = [line for line in _cpu_info() if line.startswith("flags")]
    return set(lines[0].partition(":")[2].split()) if lines else set()


def _cpu_info() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def _cache_folder() -> Path:
    """Return the cache folder, made if need be; OSError where it cannot be used."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(os.environ.get("LSSAR_CACHE") or f"{base}/lssar").expanduser().absolute()
    except RuntimeError:
        raise FileNotFoundError("no home folder") from None
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    check_trusted(folder)
    return folder


def _find(folder: Path, name: str) -> Path | None:
    """Return a library built before that still has the sha256 in its name.

    Loading a damaged one would end the process with SIGBUS.
    """
    for library in folder.glob(f"{name}-*.so"):
        if library.is_file() and library == _final_path(library.read_bytes(), folder, name):
            check_trusted(library)
            return library
    return None


def _final_path(contents: bytes, folder: Path, name: str) -> Path:
    return folder / f"{name}-{hashlib.sha256(contents).hexdigest()}.so"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which ends with the process; without it where there are no locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _build_in(folder: Path, name: str, compiler: list[str], extra: tuple[str, ...]) -> Path:
    """Compile into the folder; of several processes one does, and the others wait for it."""
    with _locked(folder):
        if library := _find(folder, name):
            return library
        for killed in folder.glob(f"{UNFINISHED}*"):  # the lock is ours: nobody works in it
            shutil.rmtree(killed, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=UNFINISHED) as temporary:
            partial = Path(temporary) / "kernel.so"
            print(
                f"lssar: compiling the CPU kernel, about {SECONDS} s, once per machine",
                file=sys.stderr,
                flush=True,
            )
            compile_kernel(partial, compiler, VARIANTS, extra)
            with partial.open("rb") as file:
                os.fsync(file.fileno())
                library = _final_path(file.read(), folder, name)
            partial.chmod(0o755)
            partial.replace(library)  # atomic: another process sees all of it or nothing
            return library


def compile_kernel(
    output: Path,
    compiler: list[str],
    variants: tuple[tuple[str, ...], ...],
    extra: tuple[str, ...] = (),
) -> None:
    """Compile with the first variant of flags that this compiler takes."""
    for variant in variants:
        flags = [*FLAGS, *CONSTANTS, *variant, *extra]
        result = _run([*compiler, *flags, str(SOURCE), "-o", str(output)])
        if result.returncode == 0:
            return
    errors = [line.strip() for line in result.stderr.splitlines() if "error" in line.lower()]
    problem = errors[0] if errors else "no message"
    raise Unavailable(f"{shlex.join(compiler)} cannot build the kernel: {problem}")


def compile_shipped(folder: Path) -> None:
    """Compile every kernel of a wheel into the folder."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        here = f"{platform.system()} on {platform.machine()}"
        raise Unavailable(f"kernels of a wheel are for Linux on x86_64, this is {here}")
    compiler = _compiler(os.environ.get("CXX", ""))
    for variant, (flags, _) in SHIPPED.items():
        compile_kernel(folder / shipped_path(variant).name, compiler, (flags,))
