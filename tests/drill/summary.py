"""Writes the page docs/reliability.md from the JSON of a drill and from nothing else."""

import json
from pathlib import Path

from support.files import write_text

from .attack import GROUPS

HEAD = """# What was tried against the system, and what happened

```bash
{command}     # attacks the system; writes this page and results/reliability.json
```

Made on {date} (Python {python}, torch {torch}, {user}). {verdict} {kills} processes were ended by
`kill -9`, and {inputs} hostile inputs were given.
{revisions} It took {minutes} minutes of computing.
"""


def read_outcomes(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # begun anew, whatever spoiled it
        return None


def write_table(target: Path, source: Path) -> Path:
    found = read_outcomes(source)
    attacks = found["attacks"]
    broken = [a["name"] for a in attacks if not a["passed"]]
    verdict = f"{len(attacks)} attacks, all of them held off."
    if found["unfinished"]:
        verdict = f"Unfinished: {', '.join(found['unfinished'])} are still to come."
    if broken:
        verdict = f"{len(attacks)} attacks, of which {', '.join(broken)} got through."
    if found["left_out"]:
        verdict += f" Not the whole drill: {len(found['left_out'])} attacks were left out."
    head = HEAD.format(
        command=found["command"],
        date=found["date"],
        python=found["python"],
        torch=found["torch"],
        user="as root" if found["root"] else "without root",
        verdict=verdict,
        revisions=revisions(found["revision"], attacks),
        minutes=round(sum(a["computing"] for a in attacks) / 60),
        kills=sum(a["kills"] for a in attacks),
        inputs=f"{sum(a['times'] for a in attacks if a['group'] == 'input'):,}",
    )
    parts = [head]
    for group, title in GROUPS.items():
        rows = [row(a) for a in attacks if a["group"] == group]
        if rows:
            lines = [f"## {title}", "", "| what was tried | how often | what happened |"]
            parts.append("\n".join([*lines, "|---|---|---|", *rows, ""]))
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, "\n".join(parts))
    return target


def revisions(begun: str, attacks: list[dict]) -> str:
    """Return the code's revision, or a word of warning where there are several."""
    if any(a["revision"] != begun for a in attacks):
        return (
            f"**Not one revision**: begun at {begun}, the code was changed during the drill; the "
            "JSON has the revision of each attack."
        )
    if begun.endswith("+"):
        return f"**Not a clean revision**: the code was at {begun[:-1]} with changes."
    return f"One run of the code at {begun}."


def row(outcome: dict) -> str:
    happened = outcome["happened"]
    if not outcome["passed"]:
        happened = f"**got through**: {happened}"
    cells = (outcome["what"], f"{outcome['times']:,}", happened)
    return "| " + " | ".join(plain(cell) for cell in cells) + " |"


def plain(text: str) -> str:
    """Return the text of one cell: no line breaks, no bars."""
    return " ".join(text.replace("|", "\\|").split())
