"""The paper's tables and figures as values: where each of their numbers is to be found.

A number is the metric of a run, or of a variant of it, at a multiple of the training length. Tables
share runs by key, and exist at both scales.
"""

from dataclasses import dataclass, field

from evaluation import AS_TRAINED
from reproduction.runs import ALPHAS, HEADLINE, PI_FACTORS, SIZES, SWEEP_STEMS, SWEPT_P, size_run


@dataclass(frozen=True)
class Column:
    factor: float  # length over the training length
    metric: str = "loss"  # "loss", "gain" or "accuracy"
    paper: str | None = None  # the paper's column


@dataclass(frozen=True)
class Row:
    key: str
    title: str
    run: str  # may hold {factor}, the column's
    variant: str = AS_TRAINED
    control: bool = False  # not of the paper
    paper: str | None = None  # row of the paper's table, where it is not the key


@dataclass(frozen=True)
class Table:
    name: str
    label: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    baseline: str | None = None
    figure: str = "lengths"  # how it is drawn: "lengths", "dots", "exponents"
    notes: tuple[str, ...] = field(default=())
    script: str = ""


TITLES = {
    "softmax": "Softmax",
    "ssmax": "SSMax",
    "sigmoid": "Sigmoid, b = -log L",
    "sigmoid-logn": "Sigmoid, b = -log N",
    "sigmoid-logn-l1": "Sigmoid, b = -log N, l1",
    "sigmoid-l1": "Sigmoid, l1",
    "relu-length": "ReLU / L",
    "relu-l1": "ReLU, l1",
    "relu-shen": "ReLU (Shen)",
    "lssa": "LSSA",
    "softmax-inverse": "Inverse",
    "softmax-recentred": "Re-centred",
    "softmax-recentred-l1": "Re-centred, l1",
    "identity": "I: x",
    "exp": "II: exp x",
    "identity-l1": "III: x, l1",
    "relu2-l1": "ReLU^2, l1",
    "relu6-l1": "ReLU6, l1",
    "gelu-l1": "GeLU, l1",
    "softplus-l1": "Softplus, l1",
    "mish-l1": "Mish, l1",
    "softmax-p15-naive": "Softmax p=15, x**15 written out",
}
TITLES |= {
    f"{stem}-p{p}": f"{title} p={p}"
    for p in SWEPT_P
    for stem, title in (
        ("softmax", "Softmax"),
        ("sigmoid-logn-l1", TITLES["sigmoid-logn-l1"]),
        ("lssar", "LSSAR"),
    )
}


def row(key: str, **changes) -> Row:
    return Row(key, changes.pop("title", TITLES[key]), changes.pop("run", key), **changes)


WINDOW_ROWS = (
    Row("softmax-window", "Softmax, sliding window", "softmax", "window", control=True),
    Row("lssar-window", "LSSAR p=15, sliding window", "lssar-p15", "window", control=True),
)
GAIN = Column(16, "gain")
LENGTHS = tuple(Column(f, paper=name) for f, name in ((1, "1K"), (2, "2K"), (4, "4K"), (8, "8K")))
ALL_LENGTHS = (*LENGTHS, Column(16, paper="16K"))
ONE_LENGTH = (Column(1, paper="1K"),)
GAIN_NOTE = (
    "Context gain: loss on the last half training length of each window with the full window, "
    "minus the loss on the same tokens with only the last training length of it; below zero, the "
    "far context helps. A sliding window of the training length is the control: it cannot use far "
    "context, so a flat curve alone does not show that far context is used."
)


def headline_table() -> Table:
    rows = (*(row(key) for key in HEADLINE), *WINDOW_ROWS)
    return Table(
        "headline", "tab:softmaxfreeatt", (*ALL_LENGTHS, GAIN), rows, "softmax", notes=(GAIN_NOTE,)
    )


def softmax_free() -> Table:
    keys = (
        *("softmax", "ssmax", "sigmoid", "sigmoid-logn", "sigmoid-logn-l1", "sigmoid-l1"),
        *("relu-length", "relu-l1", "relu-shen", "lssa"),
        *("softmax-p3", "sigmoid-logn-l1-p3", "lssar-p3"),
        *("softmax-p15", "sigmoid-logn-l1-p15", "lssar-p15"),
    )
    rows = (*(row(key) for key in keys), *WINDOW_ROWS)
    return Table(
        *("softmax_free", "tab:softmaxfreeatt", (*ALL_LENGTHS, GAIN), rows, "softmax"),
        notes=(GAIN_NOTE,),
    )


def one_length(name: str, label: str, keys: tuple[str, ...], titles: dict | None = None) -> Table:
    rows = tuple(row(key, title=(titles or {}).get(key, TITLES[key])) for key in keys)
    return Table(name, label, ONE_LENGTH, rows, "softmax", "dots")


def p_sweep() -> Table:
    rows = tuple(row(f"{stem}-p{p}") for stem in SWEEP_STEMS for p in SWEPT_P)
    naive = row("softmax-p15-naive", control=True)
    return Table("p_sweep", "fig:attcompare", ALL_LENGTHS, (*rows, naive), None, "exponents")


def adaptive_p() -> Table:
    rows = [row("lssar-p15")]
    rows += [
        Row(f"alpha={a:g}", f"LSSAR p=15, alpha = {a:g}", "lssar-p15", f"alpha={a:g}")
        for a in ALPHAS
    ]
    return Table("adaptive_p", "fig:adaptive_p", ALL_LENGTHS, (*rows, WINDOW_ROWS[1]), "lssar-p15")


def pi(metric: str) -> Table:
    columns = tuple(Column(f, metric, paper=f"{f}K") for f in PI_FACTORS)
    rows = (
        Row("base", "LSSAR p=15, not fine-tuned", "lssar-p15"),
        Row("pi", "fine-tuned with PI", "pi-{factor}x"),
        Row("no-pi", "fine-tuned without PI", "no-pi-{factor}x", control=True),
    )
    name, label = {
        "loss": ("pi", "tab:lssar_pi_valloss"),
        "accuracy": ("pi_passkey", "tab:lssar_pi_passkey"),
    }[metric]
    return Table(name, label, columns, rows, "base")


def passkey(scale: str) -> Table:
    names = (1, "1K"), (1.5, "1.5K"), (2, "2K"), (4, "4K"), (8, "8K")
    columns = tuple(Column(f, "accuracy", paper) for f, paper in names)
    if scale == "paper":
        rows = (
            Row("softmax", "Softmax", "softmax"),
            Row("lssar-p15", "LSSAR p=15", "lssar-p15"),
            Row("softmax-window", "Softmax, sliding window", "softmax", "window", control=True),
        )
    else:  # LSSAR learns the task more slowly and is given twice the steps
        rows = (
            Row("softmax", "Softmax, 5,000 steps", "passkey-softmax"),
            Row("lssar-p15", "LSSAR p=15, 10,000 steps", "passkey-lssar-more"),
            Row("softmax-window", "Softmax, window of 384", "passkey-softmax", "window", True),
            Row("lssar-half", "LSSAR p=15, 5,000 steps", "passkey-lssar", control=True),
        )
    return Table("passkey", "fig:passkey_accuracy", columns, rows, "softmax")


def scaling(scale: str, metric: str) -> Table:
    rows = []
    for size in SIZES[scale]:
        for name, title in (("softmax", "Softmax"), ("lssar", "LSSAR p=15")):
            run = size_run(scale, size, name)
            rows.append(Row(f"edu-{size}-{name}", f"{size}, {title}", run))
        if metric == "loss":
            softmax = size_run(scale, size, "softmax")
            control = f"edu-{size}-window", f"{size}, Softmax, sliding window", softmax, "window"
            rows.append(Row(*control, control=True))
    if metric == "loss":
        return Table("scaling_edu", "fig:edu_val_loss", (*ALL_LENGTHS, GAIN), tuple(rows))
    columns = (Column(1, "accuracy", "1K"),)
    return Table("scaling_edu_passkey", "fig:edu_passkey", columns, tuple(rows), None, "dots")


def all_tables(scale: str) -> dict[str, Table]:
    tables = [
        headline_table(),
        softmax_free(),
        one_length(
            "modified_scores",
            "tab:modifiedatt",
            ("softmax", "softmax-inverse", "softmax-recentred", "softmax-recentred-l1"),
        ),
        one_length(
            "decomposition",
            "tab:decomsoft",
            ("identity", "exp", "identity-l1", "softmax"),
            {"softmax": "IV: exp x, l1 (softmax)"},
        ),
        one_length(
            "activations",
            "tab:activationcomp",
            (
                *("relu-l1", "relu2-l1", "relu6-l1", "gelu-l1"),
                *("sigmoid-l1", "softplus-l1", "mish-l1", "softmax"),
            ),
            {"softmax": "exp x, l1 (softmax)"},
        ),
        p_sweep(),
        passkey(scale),
        pi("loss"),
        adaptive_p(),
        scaling(scale, "loss"),
    ]
    if scale == "paper":  # no nano model trained on ordinary text retrieves a passkey
        tables += [pi("accuracy"), scaling(scale, "accuracy")]
    return {table.name: table for table in tables}
