"""python extrapolation_report.py results/x.json: the losses of a results file in one short table.

Tables and figures of `eval_extrapolation.py`, made from its results file alone.
"""

if __name__ == "__main__":
    from errors import quiet_imports

    quiet_imports()

import math
from pathlib import Path

import numpy as np

import plots
from errors import Parser, UserError, run
from evaluation import AS_TRAINED, labels, series_label, table
from results_io import Results, read_results

KIND = "extrapolation"


def paired_differences(results: Results, reference: str) -> list[dict]:
    """Every row minus the reference checkpoint's as-trained row of that length, by segment."""
    differences = []
    for row in results.rows:
        base = results.find(checkpoint=reference, variant=AS_TRAINED, length=row["length"])
        if base is None or base is row or _overflowed(row) or _overflowed(base):
            continue
        difference = np.subtract(row["segment_losses"], base["segment_losses"])
        count = len(difference)
        differences.append(
            {key: row[key] for key in ("checkpoint", "variant", "length")}
            | {
                "reference": reference,
                "difference": float(difference.mean()),
                "standard_error": float(difference.std(ddof=1) / math.sqrt(count))
                if count > 1
                else None,
            }
        )
    return differences


def short_table(path: Path) -> str:
    """Loss by length, how much it rises, and what the far context brings: one line per series."""
    found = read_results(path)
    if found["kind"] != KIND:
        raise UserError(f"{path} holds results of {found['kind']!r}, not of {KIND!r}")
    results = Results(path, KIND, found["settings"], found.get("about", {}))
    names = labels(results.checkpoints)
    lengths = sorted({row["length"] for row in results.rows})
    body = []
    for identity, variant, rows in results.series():
        losses, gain = {row["length"]: row["loss"] for row in rows}, rows[-1]["context_gain"]
        values = list(losses.values())
        rise = None if None in values else values[-1] - values[0]
        body.append(
            [
                series_label(names[identity], variant),
                *(_number(losses[n], ".3f") if n in losses else "" for n in lengths),
                _number(rise, "+.3f"),
                _number(gain["gain"], "+.3f") if gain else "",
            ]
        )
    return table(["validation loss at", *map(str, lengths), "rise", "context gain"], body)


def _overflowed(row: dict) -> bool:
    return any(loss is None for loss in row["segment_losses"])


def tables(results: Results, reference: str) -> str:
    names = labels(results.checkpoints)
    lengths = sorted({row["length"] for row in results.rows})
    series = [
        (series_label(names[identity], variant), {row["length"]: row for row in rows})
        for identity, variant, rows in results.series()
    ]
    paired = {
        (p["checkpoint"], p["variant"], p["length"]): p for p in results.extra.get("paired", [])
    }

    def part(title, cell) -> str:
        body = [[name, *(cell(rows.get(n)) or "" for n in lengths)] for name, rows in series]
        body = [line for line in body if any(line[1:])]
        return f"\n{title}\n" + table(["", *map(str, lengths)], body) if body else ""

    def loss(row):
        return row and _with_error(row["loss"], row["standard_error"])

    def perplexity(row):
        return row and _number(row["perplexity"], ".2f")

    def gain(row):
        found = row and row["context_gain"]
        return found and _with_error(found["gain"], found["standard_error"], sign="+")

    def difference(row):
        found = row and paired.get((row["checkpoint"], row["variant"], row["length"]))
        return found and _with_error(found["difference"], found["standard_error"], sign="+")

    settings = results.settings
    sections = [
        part(f"validation loss over {settings['tokens']:,} tokens, ± standard error", loss),
        part("perplexity", perplexity),
        part("context gain: full minus near context on the same tokens (< 0: it helps)", gain),
        part(f"loss minus that of {names[reference]}, paired by segment", difference),
    ]
    return "\n".join(section for section in sections if section)


def _number(value: float | None, form: str) -> str:
    return "overflow" if value is None else format(value, form)


def _with_error(value: float | None, error: float | None, sign: str = "") -> str:
    text = _number(value, f"{sign}.4f")
    return text if error is None else f"{text} ±{error:.4f}"


# --- figures -------------------------------------------------------------------------------------


def figures(results: Results) -> list[Path]:
    """Loss by length, context gain by length, and loss by position at the longest length."""
    written = plots.save(loss_by_length(results), results.sibling(".png"))
    if any(row["context_gain"] for row in results.rows):
        written += plots.save(gain_by_length(results), results.sibling("-gain.png"))
    return written + plots.save(loss_by_position(results), results.sibling("-position.png"))


def styled_series(results: Results):
    """(label, line style, rows): a colour a checkpoint, a dash a variant, as trained first."""
    names = labels(results.checkpoints)
    colours = {identity: i for i, identity in enumerate(results.checkpoints)}
    variants = list(dict.fromkeys([AS_TRAINED, *(row["variant"] for row in results.rows)]))
    order = {identity: i for i, identity in enumerate(results.checkpoints)}
    found = sorted(results.series(), key=lambda s: (order[s[0]], variants.index(s[1])))
    for identity, variant, rows in found:
        dash = variants.index(variant)
        style = plots.line(colours[identity], dash, marker=dash == 0)
        yield series_label(names[identity], variant).replace("alpha", "α"), style, rows


def new_figure(results: Results):
    """One column wide, with room for the legend below."""
    return plots.figure(height=2.1 + 0.16 * math.ceil(len(list(results.series())) / 2))


def loss_by_length(results: Results):
    figure, axes = new_figure(results)
    for label, style, rows in styled_series(results):
        points = [(r["length"], r["loss"], r["standard_error"]) for r in rows]
        draw_by_length(axes, points, label, style)
    finish_by_length(figure, axes, results, "validation loss (nats a token)")
    return figure


def gain_by_length(results: Results):
    figure, axes = new_figure(results)
    for label, style, rows in styled_series(results):
        points = [
            (r["length"], r["context_gain"]["gain"], r["context_gain"]["standard_error"])
            for r in rows
            if r["context_gain"]
        ]
        draw_by_length(axes, points, label, style)
    axes.axhline(0, color="#777777", linewidth=0.9, zorder=1)
    finish_by_length(figure, axes, results, "context gain (nats): full − near")
    return figure


def draw_by_length(axes, points: list[tuple], label: str, style: dict) -> None:
    """Lengths, values and standard errors as a line; what overflowed is left out."""
    points = [(n, value, error or 0) for n, value, error in points if value is not None]
    if points:
        x, y, errors = zip(*points, strict=True)
        axes.errorbar(x, y, yerr=errors, elinewidth=0.7, label=label, **style)


def finish_by_length(figure, axes, results: Results, quantity: str) -> None:
    lengths = sorted({row["length"] for row in results.rows})
    plots.length_axis(axes, lengths, common_train_length(results))
    axes.set(xlabel="evaluation length (tokens)", ylabel=quantity)
    plots.legend_below(figure, axes)


def loss_by_position(results: Results):
    longest = max(row["length"] for row in results.rows)
    figure, axes = new_figure(results)
    for label, style, rows in styled_series(results):
        row = rows[-1]
        if row["length"] != longest or _overflowed(row):
            continue
        middles = [math.sqrt(b["from"] * b["to"]) for b in row["by_position"]]
        losses = [b["loss"] for b in row["by_position"]]
        axes.plot(middles, losses, label=label, **(style | {"marker": ""}))
    ticks = [2**e for e in range(4, longest.bit_length() + 1, 2) if 2**e <= longest]
    plots.length_axis(axes, ticks, common_train_length(results))
    axes.set(
        xlabel=f"position in a window of {plots.short_number(longest)} tokens",
        ylabel="validation loss (nats a token)",
    )
    plots.legend_below(figure, axes)
    return figure


def common_train_length(results: Results) -> int | None:
    found = {c["train_length"] for c in results.checkpoints.values()}
    return found.pop() if len(found) == 1 else None


def main(argv: list[str]) -> None:
    parser = Parser(__doc__)
    parser.add_argument("results", type=Path)
    print(short_table(parser.parse_args(argv).results))


if __name__ == "__main__":
    run(main)
