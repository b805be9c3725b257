"""Figures are whole or absent, and labels are shown as they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lssar.errors import UserError
from support import plots


def test_a_dollar_in_a_label_is_a_dollar(tmp_path):
    figure, axes = plots.figure()
    axes.plot([1, 10], [1, 2], label="run $x^{ $")
    axes.set(xscale="log", title="$\\nonsense{", xlabel="$")
    axes.set_yticks([1, 2], ["$a_{", "b$"])
    plots.legend_below(figure, axes)
    plots.label_ends(axes, [("$a_{$", 2, plots.INK)])
    plots.save(figure, tmp_path / "x.png")
    assert {path.name for path in tmp_path.iterdir()} == {"x.png", "x.pdf"}


def test_a_backend_that_does_not_exist_is_one_line():
    code = "from support.command import run; run(lambda argv: __import__('support.plots'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"MPLBACKEND": "nonsense"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert (
        done.stderr.startswith("error: matplotlib does not start") and done.stderr.count("\n") == 1
    )


def test_a_name_that_is_not_unicode_is_drawn(tmp_path):
    """JSON can hold half a character, and matplotlib raised a TypeError."""
    figure, axes = plots.figure()
    axes.set_title("run \udcff")
    axes.plot([1, 2], label="\ud800")
    axes.legend()
    assert len(plots.save(figure, tmp_path / "x")) == 2


def test_a_full_disk_leaves_no_half_figure(tmp_path, monkeypatch):
    figure, _ = plots.figure()
    write = figure.savefig

    def fail_half_way(file, **options):
        if options["format"] == "pdf":
            file.write(b"%PDF half")
            raise OSError(28, "No space left on device")
        write(file, **options)

    monkeypatch.setattr(figure, "savefig", fail_half_way)
    with pytest.raises(UserError, match="No space left"):
        plots.save(figure, tmp_path / "x.png")
    assert {path.name for path in tmp_path.iterdir()} == {"x.png"}
