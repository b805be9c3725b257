"""The shell scripts: they parse, install once, and fail with what to do. No network."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cases import cases
from checkout import ROOT, tracked
from train_helpers import arguments, make_corpus

import reproduce
from lssar.errors import UserError

SCRIPTS = tracked("scripts/*.sh")
TABLES = [s.stem for s in SCRIPTS if s.stem.startswith(("table_", "figure_", "scaling_", "repro"))]
STUB = "#!/usr/bin/env bash\n"


def test_scripts_parse():
    for script in cases([*SCRIPTS, ROOT / ".ci/run"]):
        subprocess.run(["bash", "-n", script], check=True)


class Submission:
    """A repository with .ci/run, in which the README's two scripts only say that they ran."""

    def __init__(self, folder: Path, code: int = 0):
        self.origin, self.temporary = folder / "origin", folder / "temporary"
        self.temporary.mkdir(parents=True)
        shutil.copytree(ROOT / ".ci", self.origin / ".ci")
        self.write("scripts/quickstart.sh", "echo quickstart $*\n")
        self.write("scripts/test.sh", f"echo test $*; exit {code}\n")
        self.git("init", "-q")
        self.commit()

    def write(self, name: str, text: str) -> None:
        (self.origin / name).parent.mkdir(parents=True, exist_ok=True)
        (self.origin / name).write_text(text)

    def git(self, *words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", self.origin, *identity, *words], check=True)

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "a")

    def run(self) -> subprocess.CompletedProcess:
        command = ["bash", self.origin / ".ci/run"]
        environment = os.environ | {"TMPDIR": str(self.temporary)}
        return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_ci_runs_the_readmes_commands_in_a_clone_at_a_path_with_spaces_and_removes_it(tmp_path):
    for code in cases([0, 3]):
        submitted = Submission(tmp_path / str(code), code)
        submitted.write("scripts/quickstart.sh", "case $PWD in *' '*) echo spaces ;; esac\n")
        submitted.commit()
        submitted.write("scripts/quickstart.sh", "echo not committed\n")
        done = submitted.run()
        assert done.returncode == code, done.stderr
        assert done.stdout.splitlines() == ["spaces", "test"]
        assert not list(submitted.temporary.iterdir())


def test_ci_runs_the_tiers_of_what_changed(tmp_path):
    tiers = {
        "physics/force.py": ["physics"],
        "lssar/triton_forward.py": ["gpu-rehearsal"],
        "lssar/hf/masks.py": ["ecosystem"],
        "tests/drill/rot.py": ["drill"],
        "model.py": [],
    }
    for number, (path, expected) in enumerate(cases(tiers.items())):
        submitted = Submission(tmp_path / str(number))
        submitted.write(path, "changed")
        submitted.commit()
        done = submitted.run()
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[2:] == [f"test --{name}" for name in expected]


@pytest.fixture
def checkout(tmp_path):
    """Copy scripts/ beside a .venv whose `python -m pip` only writes down what it was asked."""
    (tmp_path / "scripts").mkdir()
    for file in tracked("scripts"):
        shutil.copy(file, tmp_path / "scripts")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    python = tmp_path / ".venv/bin/python"
    python.write_text(STUB + 'echo "$@" >>pip.log\nexit "${PIP_EXIT:-0}"\n')
    python.chmod(0o755)
    (tmp_path / ".venv/bin/activate").write_text("VIRTUAL_ENV=.venv\necho activated\n")
    for name in ("a.txt", "b.txt", "requirements-bpe.txt"):
        (tmp_path / name).write_text(f"{name}-package==1\n")
    (tmp_path / "requirements.txt").touch()
    return tmp_path


def source(checkout, *files, user=None, **environment):
    """Run `source scripts/env.sh files...` as a script does, under its strict settings."""
    command = f"set -euo pipefail; source scripts/env.sh {' '.join(files)}; echo ready"
    return subprocess.run(
        ["bash", "-c", command],
        cwd=checkout,
        env=os.environ | {"PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
        **({"user": user, "group": user, "extra_groups": ()} if user else {}),
    )


def installs(checkout):
    log = checkout / "pip.log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_environment_is_installed_once_and_again_when_a_file_changes(checkout):
    first = source(checkout, "a.txt", "b.txt")
    assert first.returncode == 0, first.stderr
    assert "installing -r a.txt" in first.stdout
    assert first.stdout.splitlines()[-2:] == ["activated", "ready"]
    assert installs(checkout) == 3

    second = source(checkout, "a.txt", "b.txt")
    assert second.stdout.splitlines() == ["activated", "ready"]
    assert installs(checkout) == 3

    (checkout / "b.txt").write_text("b.txt-package==2\n")
    third = source(checkout, "a.txt", "b.txt")
    assert "installing -r b.txt" in third.stdout
    assert installs(checkout) == 4


def test_nothing_is_taken_for_installed_where_there_is_no_sha256sum(checkout, tmp_path):
    """macOS had none before version 15: stamp and file were both "", and nothing was installed."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for tool in ("bash", "basename", "cat", "cmp", "cp", "cut", "env"):
        (commands / tool).symlink_to(shutil.which(tool))
    first = source(checkout, "a.txt", PATH=str(commands))
    assert first.returncode == 0, first.stderr
    assert installs(checkout) == 2
    source(checkout, "a.txt", PATH=str(commands))
    assert installs(checkout) == 2


def test_a_failed_installation_is_said_and_tried_again(checkout):
    failed = source(checkout, "a.txt", PIP_EXIT="1")
    assert failed.returncode == 2
    assert "could not install -r a.txt" in failed.stderr
    assert "ready" not in failed.stdout
    assert source(checkout, "a.txt").returncode == 0
    assert installs(checkout) == 3


def test_a_missing_requirement_file_is_named(checkout):
    failed = source(checkout, "nowhere.txt", PIP_EXIT="1")
    assert failed.returncode != 0
    assert "nowhere.txt" in failed.stderr


MORTAL = 12345 if os.geteuid() == 0 else None  # root may write everywhere; it has no name either


@pytest.mark.parametrize("unwritable", [".", ".venv"])
def test_an_unwritable_checkout_is_named_and_nothing_else_is_advised(checkout, unwritable):
    python = checkout / "any-python"
    python.write_text(STUB)
    for path in (checkout, checkout / ".venv", python):
        path.chmod(0o777)
    (checkout / unwritable).chmod(0o555)
    failed = source(checkout, "a.txt", PYTHON="./any-python", user=MORTAL)
    (checkout / unwritable).chmod(0o755)
    assert failed.returncode == 2
    (line,) = failed.stderr.splitlines()
    assert f"{checkout / unwritable} is not writable" in line
    assert "apt-get" not in line
    assert installs(checkout) == 0


def test_an_installed_environment_serves_an_unwritable_checkout(checkout):
    assert source(checkout, "a.txt").returncode == 0
    for path in (checkout, checkout / ".venv"):
        path.chmod(0o555)
    python = {"PYTHON": shutil.which("true")}
    used = source(checkout, "a.txt", **python, user=MORTAL)
    for path in (checkout, checkout / ".venv"):
        path.chmod(0o755)
    assert used.returncode == 0, used.stderr
    assert used.stdout.splitlines() == ["activated", "ready"]


def test_a_python_without_venv_is_told_what_to_install(checkout):
    shutil.rmtree(checkout / ".venv")
    python = checkout / "debian-python"
    python.write_text(STUB + 'case "$*" in *ensurepip*) exit 1 ;; esac\n')
    python.chmod(0o755)
    failed = source(checkout, "a.txt", PYTHON="./debian-python")
    assert failed.returncode == 2
    assert "apt-get install python3-venv" in failed.stderr


@pytest.mark.parametrize("damage", ["interrupted", "moved"])
def test_a_half_made_or_moved_environment_is_made_again(checkout, damage):
    for name in ("a.txt", "requirements-bpe.txt"):
        (checkout / name).write_text("# nothing to install, so no network\n")
    (checkout / ".venv/bin/python").write_text(STUB + "exit 1\n")
    activate = checkout / ".venv/bin/activate"
    if damage == "interrupted":
        activate.unlink()
    else:
        activate.write_text("VIRTUAL_ENV=/somewhere/else/.venv\n")
    made = source(checkout, "a.txt")
    assert made.returncode == 0, made.stderr
    assert "== .venv is incomplete or was moved here" in made.stdout
    command = "source .venv/bin/activate && python -c 'import sys; print(sys.prefix)'"
    found = subprocess.run(["bash", "-c", command], cwd=checkout, capture_output=True, text=True)
    assert Path(found.stdout.strip()).samefile(checkout / ".venv")
    assert source(checkout, "a.txt").stdout.splitlines() == ["ready"]


def test_two_scripts_at_once_install_one_after_the_other(checkout):
    python = checkout / ".venv/bin/python"
    python.write_text(STUB + 'echo "begin $*" >>pip.log\nsleep 0.2\necho "end $*" >>pip.log\n')
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda _: source(checkout, "a.txt", "b.txt"), range(3)))
    assert all(d.returncode == 0 and d.stdout.endswith("ready\n") for d in done), done
    lines = (checkout / "pip.log").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["begin", "end"] * 3
    assert sum("waiting for another script" in d.stdout for d in done) >= 1


def test_a_missing_python_is_named(checkout):
    failed = source(checkout, "a.txt", PYTHON="no-such-python")
    assert failed.returncode == 2
    assert "Python 3.11" in failed.stderr
    assert "no-such-python" in failed.stderr
    assert installs(checkout) == 0


# --- every table and figure can be planned -------------------------------------------------------


@pytest.fixture
def started(checkout):
    """Run a script where python and torchrun only write down what they were asked to start."""
    for file in tracked("requirements*.txt"):
        shutil.copy(file, checkout)
    activate = 'VIRTUAL_ENV="$PWD/.venv"\nPATH="$PWD/.venv/bin:$PATH"\n'
    (checkout / ".venv/bin/activate").write_text(activate)
    log = checkout / "started.log"
    for name in ("python", "torchrun"):
        stub = checkout / ".venv/bin" / name
        code = (
            f'[ "$2" = pip ] || {{ echo {name} "$@" >>started.log; exit "${{STUB_EXIT:-0}}"; }}\n'
        )
        stub.write_text(STUB + code)
        stub.chmod(0o755)

    def run(script, *arguments, **environment):
        log.write_text("")
        done = subprocess.run(
            ["bash", f"scripts/{script}.sh", *arguments],
            cwd=checkout,
            env=os.environ | {"PYTHON": sys.executable} | environment,
            capture_output=True,
            text=True,
        )
        return done, log.read_text().splitlines()

    return run


def reproduces(script):
    """Return what a script asks of reproduce.py."""
    name = script if script == "scaling_edu" else script.partition("_")[2]
    return {"table_parts": "parts half_weight"}.get(script, name)


def test_a_script_starts_reproduce_py_with_its_arguments_and_nothing_else(started):
    for script in TABLES:
        done, commands = started(script, "--plan", "--gpus", "4", SCALE="paper")
        assert done.returncode == 0, done.stderr
        page = " --page site" if script == "reproduce_all" else ""
        given = f"--scale paper{page} --plan --gpus 4"
        assert commands == [f"python reproduce.py {reproduces(script)} {given}"]
        refused, _ = started(script, "--plann", STUB_EXIT="2")
        assert refused.returncode == 2


def test_physics_simulates_trains_and_searches_for_every_seed(started):
    given = {"SCALE": "paper", "SEEDS": "0,3", "GPUS": "4", "OUT": "out.json"}
    done, commands = started("table_physics", "--run", **given)
    assert done.returncode == 0, done.stderr
    launched = [c for c in commands if c.startswith("torchrun")]
    assert len(launched) == 4 and all("--nproc_per_node=4 physics/train.py" in c for c in launched)
    assert commands[-1].startswith("python physics/discover.py") and "out.json" in commands[-1]


def test_reproduce_py_refuses_an_unknown_argument_in_one_line():
    with pytest.raises(UserError, match="--plann") as caught:
        reproduce.main(["pi", "--plann"])
    assert "\n" not in str(caught.value)


def test_the_quickstart_refuses_arguments(started):
    done, commands = started("quickstart", "--plan")
    assert (done.returncode, commands, len(done.stderr.splitlines())) == (2, [], 1)


# --- SLURM ---------------------------------------------------------------------------------------

# Two nodes, both of them this machine.
SRUN = """shift
"$@" & first=$!
"$@" & second=$!
trap 'kill -TERM $first $second' TERM
for _ in 1 2; do wait $first; wait $second; done
"""
SCONTROL = (
    'case $1 in show) printf "127.0.0.1\\n127.0.0.2\\n" ;; *) echo "$@" >>scontrol.log ;; esac\n'
)
JOB = str(os.getpid() % 20000)  # its port follows from it


@pytest.fixture
def cluster(tmp_path):
    """Make a place to submit from: srun and scontrol are stubs, and so is what is in `commands`."""

    def make(**commands):
        (tmp_path / ".venv/bin").mkdir(parents=True)
        (tmp_path / ".venv/bin/activate").write_text('PATH="$PWD/.venv/bin:$PATH"\n')
        for name, body in {"srun": SRUN, "scontrol": SCONTROL, **commands}.items():
            stub = tmp_path / ".venv/bin" / name
            stub.write_text(STUB + body)
            stub.chmod(0o755)
        (tmp_path / "train.py").symlink_to(ROOT / "train.py")
        slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": JOB, "SLURM_NNODES": "2"}
        slurm |= {"SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_GPUS_ON_NODE": "1"}
        return os.environ | slurm | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

    return make


def requeued(folder):
    log = folder / "scontrol.log"
    return log.read_text().splitlines() == [f"requeue {JOB}"] if log.exists() else False


# What the run says of itself before and after the step, with the exit code; what the job does.
@pytest.mark.parametrize(
    "before, after, code, again",
    [
        (("0 of 9", 1), ("9 of 9, finished", 0), 0, False),
        (("0 of 9", 1), ("5 of 9, stopped", 75), 0, True),
        (("5 of 9, stopped", 75), ("7 of 9, stopped", 75), 0, True),
        (("5 of 9, stopped", 75), ("5 of 9, stopped", 75), 1, False),  # failed at the start
        (("5 of 9, stopped", 75), ("7 of 9", 1), 1, False),
        (("", 2), ("", 0), 2, False),  # a mistake in the config
    ],
)
def test_slurm_asks_the_run_and_not_torchruns_exit_code(
    cluster, tmp_path, before, after, code, again
):
    said = "if [ -e started ]; then echo '{}'; exit {}; else echo '{}'; exit {}; fi\n"
    environment = cluster(
        torchrun='echo "$@" >started; exit 1\n', python=said.format(*after, *before)
    )
    script = ["bash", ROOT / "scripts/slurm.sh", "c.toml"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert requeued(tmp_path) == again
    assert (tmp_path / "started").exists() == (code != 2)


def test_slurms_script_started_by_hand_is_one_line():
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    script = ["bash", ROOT / "scripts/slurm.sh", "c.toml"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    said = "error: start this with sbatch: sbatch scripts/slurm.sh CONFIG\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_a_slurm_job_that_is_signalled_saves_and_goes_back_into_the_queue(cluster, tmp_path):
    """With two real torchrun, which meet over loopback, and train.py; only SLURM's are stubs."""
    interpreter = f"exec {shlex.quote(sys.executable)}"
    torchrun = f'{interpreter} -m torch.distributed.run --local-addr=127.0.0.1 "$@"\n'
    environment = cluster(torchrun=torchrun, python=f'{interpreter} "$@"\n')
    more = ("--train.micro_batch=4", "--train.steps=4000", "--device=cpu")
    given = arguments(make_corpus(tmp_path / "corpus"), tmp_path / "runs", *more)
    job = subprocess.Popen(
        ["bash", ROOT / "scripts/slurm.sh", *given],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = []
    for line in job.stdout:
        lines.append(line)
        if line.startswith("step 3/"):
            job.send_signal(signal.SIGTERM)
    assert job.wait() == 0, "".join(lines)
    assert requeued(tmp_path), "".join(lines)
    assert "steps are saved; stopped by SIGTERM after step" in lines[-1]
