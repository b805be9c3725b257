"""A figure a table: loss by length, dots for a single length, loss by exponent."""

import plots
from reproduction.experiments import Table
from reproduction.plan import Workspace
from reproduction.runs import SWEEP_STEMS, SWEPT_P


def draw(table: Table, built: dict, space: Workspace) -> list[str]:
    """Write the figure of a table and return its files; nothing where nothing was measured."""
    if not any(is_number(cell) for row in built["rows"] for cell in row["measured"]):
        return []
    figure = {"lengths": by_length, "dots": dots, "exponents": by_exponent}[table.figure](
        table, built, space
    )
    target = space.table(table.name).with_suffix(".png")
    return [path.as_posix() for path in plots.save(figure, target) if path.suffix == ".png"]


def is_number(cell: dict | None) -> bool:
    return cell is not None and cell["mean"] is not None


def quantity(built: dict) -> str:
    accuracy = built["unit"] == "per cent"
    return "passkey accuracy (%)" if accuracy else f"validation loss ({built['unit']})"


def by_length(table: Table, built: dict, space: Workspace):
    """A line a row; controls are dashed; bars are the spread over seeds."""
    lengths = [int(column["key"].partition("@")[2]) for column in built["columns"]]
    shown = [i for i, column in enumerate(table.columns) if column.metric != "gain"]
    wide = len(built["rows"]) > 9
    legend_rows = -(-len(built["rows"]) // (3 if wide else 2))
    figure, axes = plots.figure(
        width=plots.PAGE if wide else 1.2 * plots.COLUMN, height=2.3 + 0.16 * legend_rows
    )
    for number, row in enumerate(built["rows"]):
        cells = [(lengths[i], row["measured"][i]) for i in shown]
        points = [(x, cell) for x, cell in cells if is_number(cell)]
        if points:
            axes.errorbar(
                [x for x, _ in points],
                [cell["mean"] for _, cell in points],
                yerr=[cell["sd"] or 0 for _, cell in points],
                elinewidth=0.7,
                label=row["title"],
                **plots.line(number, dash=1 if row["control"] else 0),
            )
    accuracy = built["unit"] == "per cent"
    trained = space.scale.passkey_length(1) if accuracy else space.scale.length(1)
    plots.length_axis(axes, [lengths[i] for i in shown], trained)
    axes.set(xlabel="evaluation length (tokens)", ylabel=quantity(built))
    plots.legend_below(figure, axes, columns=3 if wide else 2)
    return figure


def dots(table: Table, built: dict, space: Workspace):
    """Single values side by side, with the noise of a seed as a band about the baseline."""
    rows = [row for row in built["rows"] if is_number(row["measured"][0])]
    figure, axes = plots.figure(height=0.9 + 0.22 * len(rows))
    noise = built["columns"][0].get("noise")
    baseline = next((r for r in rows if r["key"] == table.baseline), None)
    if baseline and noise:
        centre = baseline["measured"][0]["mean"]
        axes.axvspan(centre - noise, centre + noise, color="#e8e8e8", zorder=0, linewidth=0)
    for height, row in enumerate(rows):
        cell = row["measured"][0]
        style = plots.line(0) | {"linestyle": ""}
        axes.errorbar(cell["mean"], height, xerr=cell["sd"] or 0, elinewidth=0.7, **style)
    axes.set_yticks(range(len(rows)), [row["title"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(quantity(built) + ("\nband: noise of a seed" if baseline and noise else ""))
    return figure


def by_exponent(table: Table, built: dict, space: Workspace):
    """A panel a mechanism, a line a length."""
    rows = {row["key"]: row for row in built["rows"]}
    figure, panels = plots.figure(1, len(SWEEP_STEMS), width=plots.PAGE, height=2.6, sharey=True)
    for axes, (stem, title) in zip(
        panels, (("softmax", "Softmax"), ("lssar", "LSSA")), strict=True
    ):
        for i, column in enumerate(built["columns"]):
            cells = [(p, rows[f"{stem}-p{p}"]["measured"][i]) for p in SWEPT_P]
            points = [(p, cell["mean"]) for p, cell in cells if is_number(cell)]
            if points:
                axes.plot(*zip(*points, strict=True), label=column["title"], **plots.line(i))
        axes.set(xlabel="exponent p", title=title, xticks=SWEPT_P)
    panels[0].set_ylabel(quantity(built))
    plots.legend_below(figure, panels[0], columns=5)
    return figure
