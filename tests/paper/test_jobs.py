"""Jobs that survive each other."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paper.jobs import Job, Pool, run_all

ROOT = Path(__file__).parents[2]
PYTHON = sys.executable


def shell_job(name: str, code: str, made: Path, *needs: str) -> Job:
    return Job(name, (PYTHON, "-c", code), made.exists, needs)


def test_a_failed_job_stops_only_those_that_need_it(tmp_path):
    touch = "import sys, pathlib; pathlib.Path({!r}).touch()"
    a, b, c = (tmp_path / name for name in "abc")
    jobs = [
        shell_job("a", "import sys; sys.exit('disk on fire')", a),
        shell_job("after a", touch.format(str(b)), b, "a"),
        shell_job("c", touch.format(str(c)), c),
        shell_job("after that", touch.format(str(b)), b, "after a"),
    ]
    states = run_all(jobs, tmp_path / "logs", parallel=2)
    assert "exit code 1: disk on fire" in states["a"]
    assert states["after a"] == "not started: it needs 'a'"
    assert states["after that"] == "not started: it needs 'after a'"
    assert states["c"] == "done"
    assert not b.exists()


def test_a_job_that_ends_well_without_its_result_has_failed(tmp_path):
    states = run_all([shell_job("idle", "pass", tmp_path / "x")], tmp_path / "logs", parallel=1)
    assert states["idle"].startswith("failed with exit code 0")


def test_every_job_has_one_thread_whatever_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    made = tmp_path / "made"
    code = f"import os; open({str(made)!r}, 'w').write(os.environ['OMP_NUM_THREADS'])"
    run_all([shell_job("one", code, made)], tmp_path / "logs", 1)
    assert made.read_text() == "1"


def test_what_is_done_is_not_done_again(tmp_path, capsys):
    made = tmp_path / "made"
    code = f"open({str(made)!r}, 'a').write('x')"
    for _ in range(2):
        assert run_all([shell_job("once", code, made)], tmp_path / "logs", 1) == {"once": "done"}
    assert made.read_text() == "x"
    assert "1 of 1 jobs are done already" in capsys.readouterr().out


def test_sigterm_reaches_the_jobs_and_gives_them_time_to_save(tmp_path):
    started, saved = tmp_path / "started", tmp_path / "saved"
    child = (
        "import signal, sys, time, pathlib\n"
        f"def stop(*_): pathlib.Path({str(saved)!r}).touch(); sys.exit(75)\n"
        f"signal.signal(signal.SIGTERM, stop); pathlib.Path({str(started)!r}).touch()\n"
        "time.sleep(60)"
    )
    parent = (
        "from pathlib import Path; from paper.jobs import Job, run_all\n"
        f"run_all([Job('slow', ({PYTHON!r}, '-c', {child!r}), lambda: False)], "
        f"Path({str(tmp_path / 'logs')!r}), 1)"
    )
    process = subprocess.Popen([PYTHON, "-c", parent], cwd=ROOT, stderr=subprocess.PIPE)
    while not started.exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)
    assert saved.exists()
    assert process.returncode != 0


def test_an_interrupt_among_many_quick_jobs_is_only_that(tmp_path):
    """It walked over a set of processes that their threads were changing."""
    handler = signal.getsignal(signal.SIGTERM)
    for round_ in range(3):
        jobs = [Job(f"{round_} {i}", ("sleep", f"0.0{i % 10}"), lambda: True) for i in range(40)]
        with pytest.raises(KeyboardInterrupt), Pool(tmp_path) as pool:
            for job in jobs:
                pool.start(job)
            list(pool.finished())
            raise KeyboardInterrupt
        assert all(process.returncode is not None for process in pool.running)
    assert signal.getsignal(signal.SIGTERM) is handler


def test_no_job_starts_after_the_others_were_told_to_stop(tmp_path, monkeypatch):
    started = tmp_path / "started"
    command = ("sh", "-c", f"echo x >> '{started}'; exec sleep 5")
    jobs = [Job(str(i), command, lambda: False) for i in range(6)]
    wait = time.sleep

    def interrupt(seconds):
        wait(seconds)
        if started.exists() and len(started.read_text().split()) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_all(jobs, tmp_path / "logs", parallel=2)
    assert len(started.read_text().split()) == 2


def test_many_quick_jobs_all_end(tmp_path):
    made = [tmp_path / str(i) for i in range(200)]
    jobs = [Job(path.name, ("touch", str(path)), path.exists) for path in made]
    assert run_all(jobs, tmp_path / "logs", 16) == {path.name: "done" for path in made}
