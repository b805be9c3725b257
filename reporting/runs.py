"""The table of runs: status, seed, tokens, time, loss, commit and config of each."""

from reporting.markup import Html, join, tag
from reporting.records import Run
from reporting.tables import NOTHING, chip, link, plain, sortable, td
from reporting.verdicts import BAD, GOOD, OPEN

RUN_NUMBERS = ("seed", "tokens", "seconds", "loss", "parameters")
RUN_TEXTS = ("commit", "torch", "device")


def runs_table(runs: list[Run], href: str | None, label: str) -> Html:
    """What every run was; a column that no run has is left out."""
    seconds, tokens = (sum(getattr(r, key) or 0 for r in runs) for key in ("seconds", "tokens"))
    total = (
        f"{len(runs)} runs, {tokens:,} training tokens, {seconds / 3600:.1f} hours of training. "
    )
    known = {
        key for key in RUN_NUMBERS + RUN_TEXTS if any(getattr(r, key) is not None for r in runs)
    }
    numbers = [key for key in RUN_NUMBERS if key in known]
    texts = [key for key in RUN_TEXTS if key in known]
    return join(
        tag("p", total, tag("a", "JSON", href=href), class_="about"),
        sortable(
            label,
            ["run", "status", *numbers, *texts, "config"],
            [run_row(run, href, numbers, texts) for run in runs],
            "runs",
            unsorted=["config"],
        ),
    )


def run_row(run: Run, href: str | None, numbers: list[str], texts: list[str]) -> list[Html]:
    state = GOOD if run.status == "done" else BAD if run.status.startswith("failed") else OPEN
    return [
        tag("th", run.name, scope="row", data_sort=run.name),
        td(chip(state, run.status), run.status),
        *(td(run_number(getattr(run, key), href), getattr(run, key)) for key in numbers),
        *(
            td(tag("code", value[:10]) if value else NOTHING, value)
            for value in (getattr(run, key) for key in texts)
        ),
        td(config_details(run) if run.config else NOTHING),
    ]


def run_number(value: float | None, href: str | None) -> Html:
    return NOTHING if value is None else link(plain(round(value, 4)), href, title=value)


def config_details(run: Run) -> Html:
    return tag("details", tag("summary", "config"), tag("pre", "\n".join(run.config)))
