"""The cache of the built CPU kernel: damaged files, folders of other users, several at once.

Each case is a process of its own, as a damaged library may end the process that loads it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from lssar import cpu, cpu_build

ROOT = Path(__file__).parents[2]
ANOTHER_USER = 12345  # unknown to the system, as in a container started with --user

pytestmark = pytest.mark.skipif(cpu.unavailable() is not None, reason=str(cpu.unavailable()))
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

LOAD = """
import ctypes
import os
import sys
from lssar import cpu_build

user = int(sys.argv[1])
cpu_build.FLAGS = ("-std=c++17", "-shared", "-fPIC")  # built in a second
if user:  # not before the imports: root's Python need not be there for others
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
library = ctypes.CDLL(str(cpu_build.build()))
library.lssar_call_layout.restype = ctypes.c_char_p
assert b"queries=" in library.lssar_call_layout()
print("right")
"""
COMPUTE = """
import torch
from lssar import attend, cpu_build

cpu_build.FLAGS = ("-std=c++17", "-shared", "-fPIC")
q, k, v = torch.randn(3, 1, 2, 50, 16).unbind()
expected = attend(q, k, v, backend="eager")
assert (attend(q, k, v) - expected).abs().max() < 1e-4
print("right")
"""


def start(folder, program=LOAD, user=0, **environment):
    """Start a program that needs the kernel; its cache and temporary folder are in `folder`."""
    own = ("LSSAR_CACHE", "XDG_CACHE_HOME", "HOME")
    inherited = {k: v for k, v in os.environ.items() if k not in own}
    (folder / "tmp").mkdir(exist_ok=True)
    (folder / "tmp").chmod(0o1777)
    places = {"LSSAR_CACHE": str(folder / "cache"), "TMPDIR": str(folder / "tmp")} | environment
    places["PYTHONPATH"] = str(ROOT)
    return subprocess.Popen(
        [sys.executable, "-c", program, str(user)],
        cwd=folder,
        env=inherited | {name: value for name, value in places.items() if value is not None},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process):
    """Return what a process said besides that it compiles; its result must be right."""
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out) == (0, "right\n"), err
    return "".join(line for line in err.splitlines(True) if "compiling the CPU kernel" not in line)


def libraries(folder):
    return sorted(folder.glob("**/lssar_cpu-*.so"))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    assert result(start(folder, COMPUTE)) == ""
    return folder / "cache"


def truncate(library):
    os.truncate(library, library.stat().st_size // 2)


def flip_a_byte_of_code(library):
    contents = bytearray(library.read_bytes())
    contents[len(contents) // 2] ^= 0xFF
    library.write_bytes(contents)


def replace_by_garbage(library):
    library.write_bytes(os.urandom(5000))


def empty(library):
    library.write_bytes(b"")


def replace_by_a_fifo(library):
    library.unlink()
    os.mkfifo(library)


def replace_by_a_broken_link(library):
    library.unlink()
    library.symlink_to("nowhere")


DAMAGES = (truncate, flip_a_byte_of_code, replace_by_garbage, empty)
DAMAGES += (replace_by_a_fifo, replace_by_a_broken_link)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_a_damaged_library_is_built_again(built, tmp_path, damage):
    shutil.copytree(built, tmp_path / "cache")
    (library,) = libraries(tmp_path / "cache")
    intact = library.read_bytes()
    damage(library)
    assert result(start(tmp_path)) == ""
    assert library.is_file() and library.read_bytes() == intact
    assert not libraries(tmp_path / "tmp")


def test_a_folder_in_place_of_the_library_is_left_alone_with_a_notice(built, tmp_path):
    shutil.copytree(built, tmp_path / "cache")
    (library,) = libraries(tmp_path / "cache")
    library.unlink()
    library.mkdir()
    (library / "mine").touch()
    assert str(library) in result(start(tmp_path))
    assert (library / "mine").exists() and len(libraries(tmp_path / "tmp")) == 1


def test_several_at_once_build_one_library_whatever_lies_there(built, tmp_path):
    shutil.copytree(built, tmp_path / "cache")
    (library,) = libraries(tmp_path)
    truncate(library)
    processes = [start(tmp_path) for _ in range(3)]
    assert [result(p) for p in processes] == [""] * 3
    assert list((tmp_path / "cache").iterdir()) == [library]


def test_a_cache_that_can_only_be_read_is_used_as_it_is(built, tmp_path):
    shutil.copytree(built, tmp_path / "cache")
    (tmp_path / "cache").chmod(0o500)
    assert result(start(tmp_path)) == ""
    assert not libraries(tmp_path / "tmp")


def test_a_killed_build_leaves_nothing_behind_at_the_next_one(built, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    process = start(tmp_path, CXX=str(slow_compiler(tmp_path)))
    while not list(cache.glob("build-*")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.kill()
    process.communicate()
    assert len(list(cache.glob("build-*"))) == 1
    assert result(start(tmp_path)) == ""
    assert list(cache.iterdir()) == libraries(cache)


def slow_compiler(folder):
    script = folder / "slow"
    script.write_text('#!/bin/sh\ncase "$1" in --version) echo slow;; *) exec sleep 60;; esac\n')
    script.chmod(0o755)
    return script


@pytest.mark.parametrize("open_to", [0o020, 0o002], ids=["group", "all"])
def test_a_cache_that_others_can_write_is_not_trusted(built, tmp_path, open_to):
    shutil.copytree(built, tmp_path / "cache")
    (tmp_path / "cache").chmod(0o700 | open_to)
    notice = result(start(tmp_path))
    assert "can be written by other users" in notice and "set LSSAR_CACHE" in notice
    assert len(libraries(tmp_path / "tmp")) == 1


def test_a_cache_below_a_folder_that_others_can_rename_in_is_not_trusted(built, tmp_path):
    """They could put another cache in its place between the check and the loading."""
    shared = tmp_path / "shared"
    shutil.copytree(built, shared / "cache")
    for mode, trusted in ((0o777, False), (0o1777, True)):
        shared.chmod(mode)
        notice = result(start(tmp_path, LSSAR_CACHE=str(shared / "cache")))
        assert (notice == "") == trusted, oct(mode)


def test_a_library_that_others_can_write_is_not_loaded(built, tmp_path):
    shutil.copytree(built, tmp_path / "cache")
    (library,) = libraries(tmp_path / "cache")
    library.chmod(0o777)
    assert "can be written by other users" in result(start(tmp_path))
    assert len(libraries(tmp_path / "tmp")) == 1


@as_root
def test_a_library_of_another_user_is_not_loaded(built, tmp_path):
    shutil.copytree(built, tmp_path / "cache")
    (library,) = libraries(tmp_path / "cache")
    os.chown(library, ANOTHER_USER, ANOTHER_USER)
    assert "belongs to another user" in result(start(tmp_path))
    assert len(libraries(tmp_path / "tmp")) == 1


def assert_kept_in_a_private_folder(process, folder, user=0):
    notice = result(process)
    assert notice.count("the built CPU kernel is kept in") == 1
    assert "set LSSAR_CACHE" in notice
    (library,) = libraries(folder / "tmp")
    assert library.parent.stat().st_mode & 0o777 == 0o700
    assert library.parent.stat().st_uid == (user or os.geteuid())
    return library


@pytest.mark.parametrize(
    "environment",
    [
        {"LSSAR_CACHE": "{file}/cache"},
        {"LSSAR_CACHE": "{file}"},
        {"LSSAR_CACHE": None, "XDG_CACHE_HOME": "{file}"},
        {"LSSAR_CACHE": None, "HOME": "{file}"},
    ],
    ids=["below a file", "a file", "XDG_CACHE_HOME a file", "HOME a file"],
)
def test_where_no_cache_folder_can_be_a_private_one_is_used(tmp_path, environment):
    file = tmp_path / "file"
    file.touch()
    given = {k: v and v.format(file=file) for k, v in environment.items()}
    library = assert_kept_in_a_private_folder(start(tmp_path, **given), tmp_path)
    built = library.stat().st_mtime_ns
    assert_kept_in_a_private_folder(start(tmp_path, **given), tmp_path)
    assert library.stat().st_mtime_ns == built


@pytest.fixture
def foreign():
    """Make a folder that another user can enter, with a home in it that no other user can."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "home").mkdir(mode=0o700)
        yield folder


@as_root
@pytest.mark.parametrize("home", ["of another user", "read-only", "unset"])
def test_as_another_user(foreign, home):
    if not all(folder.stat().st_mode & 0o001 for folder in cpu_build.SOURCE.parents):
        pytest.skip("no other user can read this checkout")
    (foreign / "home").chmod(0o755 if home == "read-only" else 0o700)
    place = None if home == "unset" else str(foreign / "home")
    process = start(foreign, user=ANOTHER_USER, LSSAR_CACHE=None, HOME=place)
    assert_kept_in_a_private_folder(process, foreign, ANOTHER_USER)


def test_the_cache_may_be_the_folder_one_is_in(tmp_path):
    assert result(start(tmp_path, LSSAR_CACHE=".")) == ""
    assert len(libraries(tmp_path)) == 1


@pytest.mark.parametrize("kind", ["open to all", "a link", "of another user"])
def test_a_temporary_folder_that_others_can_write_is_not_trusted(tmp_path, kind):
    if kind == "of another user" and os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    (tmp_path / "file").touch()
    private = tmp_path / "tmp" / f"lssar-{os.geteuid()}"
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    private.parent.mkdir()
    if kind == "a link":
        private.symlink_to(tmp_path / "elsewhere")
    else:
        private.mkdir(mode=0o700)
        private.chmod(0o777 if kind == "open to all" else 0o700)
        if kind == "of another user":
            os.chown(private, ANOTHER_USER, ANOTHER_USER)
    notice = result(start(tmp_path, COMPUTE, LSSAR_CACHE=str(tmp_path / "file" / "cache")))
    assert "open to other users" in notice and "set LSSAR_CACHE" in notice
    assert not libraries(tmp_path)
