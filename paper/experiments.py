"""The paper's tables and figures as values: where each of their numbers is to be found.

A number is a quantity of a run, or of a variant of it, at a multiple of the training length or on a
task. Tables share runs by key, and exist at both scales.
"""

from dataclasses import dataclass

from evaluating.results import AS_TRAINED
from evaluating.task_columns import LAYOUTS, LOWER_IS_BETTER, PER_CENT
from paper.runs import (
    ALPHAS,
    HEADLINE,
    MAIN_PAIR,
    PI_FACTORS,
    SIZES,
    SWEEP_STEMS,
    SWEPT_P,
    edu_runs,
    size_run,
)

EXTRAPOLATION, PASSKEY = "extrapolation", "passkey"


@dataclass(frozen=True)
class Column:
    factor: float | None = None  # length over the training length
    quantity: str = "loss"
    task: str = ""
    title: str = ""  # where it is not the length
    paper: str | None = None  # the paper's column
    lower_is_better: bool = True
    percent: bool = False  # a share, shown in per cent

    def run(self, key: str) -> str:
        """The run that a row's key means here."""
        return key if self.factor is None else key.format(factor=f"{self.factor:g}")


@dataclass(frozen=True)
class Row:
    key: str
    title: str
    run: str  # may hold {factor}, the column's
    variant: str = AS_TRAINED  # "window" is one of the training length
    control: bool = False  # not of the paper


@dataclass(frozen=True)
class Table:
    name: str
    label: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    baseline: str | None = None
    figure: str = "lengths"  # how it is drawn: "lengths", "gaps", "bars", "exponents", "columns"
    folder: str = EXTRAPOLATION  # of the results that it is made of
    notes: tuple[str, ...] = ()
    title: str = ""  # where it is not the paper's
    panels: tuple[str, ...] = ("",)  # of the figure: rows whose keys begin so share one
    pictures: str = ""  # that the evaluations drew: names below results/SCALE, with *


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
TITLES |= {
    f"edu-{size}-{name}": f"{size}, {title}"
    for sizes in SIZES.values()
    for size in sizes
    for name, title in (("softmax", "Softmax"), ("lssar", "LSSAR p=15"))
}


def row(key: str, **changes) -> Row:
    return Row(key, changes.pop("title", TITLES[key]), changes.pop("run", key), **changes)


WINDOW_ROWS = (
    Row("softmax-window", "Softmax, sliding window", "softmax", "window", control=True),
    Row("lssar-window", "LSSAR p=15, sliding window", "lssar-p15", "window", control=True),
)
GAIN = Column(16, "context_gain")
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
        *("headline", "tab:softmaxfreeatt", (*ALL_LENGTHS, GAIN), rows, "softmax"),
        notes=(GAIN_NOTE,),
        title="LSSAR and its baselines, several seeds, validation loss by evaluation length",
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
    return Table(name, label, ONE_LENGTH, rows, "softmax", "bars")


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
    return Table(
        *("adaptive_p", "fig:adaptive_p", ALL_LENGTHS, (*rows, WINDOW_ROWS[1]), "lssar-p15"),
        figure="gaps",
    )


def accuracy(factor: float, paper: str) -> Column:
    return Column(factor, "accuracy", paper=paper, lower_is_better=False, percent=True)


def pi(quantity: str) -> Table:
    rows = (
        Row("base", "LSSAR p=15, not fine-tuned", "lssar-p15"),
        Row("pi", "fine-tuned with PI", "pi-{factor}x"),
        Row("no-pi", "fine-tuned without PI", "no-pi-{factor}x", control=True),
    )
    if quantity == "loss":
        columns = tuple(Column(f, paper=f"{f}K") for f in PI_FACTORS)
        return Table("pi", "tab:lssar_pi_valloss", columns, rows, "base")
    columns = tuple(accuracy(f, f"{f}K") for f in PI_FACTORS)
    return Table("pi_passkey", "tab:lssar_pi_passkey", columns, rows, "base", folder=PASSKEY)


def passkey(scale: str) -> Table:
    names = (1, "1K"), (1.5, "1.5K"), (2, "2K"), (4, "4K"), (8, "8K")
    columns = tuple(accuracy(*name) for name in names)
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
            Row("softmax-window", "Softmax, sliding window", "passkey-softmax", "window", True),
            Row("lssar-half", "LSSAR p=15, 5,000 steps", "passkey-lssar", control=True),
        )
    return Table(
        *("passkey", "fig:passkey_accuracy", columns, rows, "softmax"),
        folder=PASSKEY,
        pictures="passkey/*-depth.png",
    )


def scaling(scale: str, quantity: str) -> Table:
    rows = []
    for size in SIZES[scale]:
        for name in ("softmax", "lssar"):
            rows.append(row(f"edu-{size}-{name}", run=size_run(scale, size, name)))
        if quantity == "loss":
            softmax = size_run(scale, size, "softmax")
            control = f"edu-{size}-window", f"{size}, Softmax, sliding window", softmax, "window"
            rows.append(Row(*control, control=True))
    if quantity == "loss":
        return Table(
            *("scaling_edu", "fig:edu_val_loss", (*ALL_LENGTHS, GAIN), tuple(rows)),
            panels=tuple(f"edu-{size}" for size in SIZES[scale]),
        )
    return Table(
        *("scaling_edu_passkey", "fig:edu_passkey", (accuracy(1, "1K"),), tuple(rows)),
        figure="bars",
        folder=PASSKEY,
    )


# --- tables of one measurement over several runs -------------------------------------------------


def attention_maps(scale: str) -> Table:
    columns = (
        Column(quantity="sink", title="mean weight on token 1"),
        Column(quantity="entropy", title="entropy (nats)"),
        Column(quantity="zeros", title="share of exact zeros"),
    )
    keys = dict.fromkeys((*MAIN_PAIR, *edu_runs(scale)))
    rows = tuple(Row(key, TITLES[key], key) for key in keys)
    name = "attention_maps"
    return Table(
        *(name, "fig:attmap", columns, rows, "softmax", "columns", name),
        pictures="attention_maps/*.png",
    )


def cost() -> Table:
    quantities = {
        "train_ms": "training ms",
        "train_MB": "training MB",
        "eval_ms": "evaluation ms",
        "eval_MB": "evaluation MB",
    }
    columns = tuple(Column(quantity=q, title=t, paper=q) for q, t in quantities.items())
    names = {"softmax": "Softmax", "lssa": "LSSA", "lssar": "LSSAR p=15"}
    rows = [Row(name, f"{title}, eager", name, "eager") for name, title in names.items()]
    kernels = {"sdpa": ["softmax"], "cpu": ["lssa", "lssar"], "triton": ["lssa", "lssar"]}
    rows += [
        Row(f"{name}-{backend}", f"{names[name]}, {backend}", name, backend, control=True)
        for backend, found in (kernels | {"rowblock": list(names)}).items()
        for name in found
    ]
    return Table("cost", "tab:comp_analysis", columns, tuple(rows), "softmax", "columns", "cost")


def downstream(name: str, label: str, keys: tuple[str, ...], baseline: str | None) -> Table:
    """The columns of the paper's layout, and those of the nano tasks that stand in for it."""
    tasks = ("lambada", "nano_cloze") if name == "lambada" else ("",)
    columns = tuple(
        Column(
            quantity=metric,
            task=task,
            title=title,
            paper=metric if task.startswith("lambada") else task,
            lower_is_better=metric in LOWER_IS_BETTER,
            percent=metric in PER_CENT,
        )
        for _, _, layout in LAYOUTS
        for task, metric, title in layout
        if task.startswith(tasks) and (name == "lambada" or not task.startswith("lambada"))
    )
    rows = tuple(Row(key, TITLES[key], key) for key in dict.fromkeys(keys))
    note = "At nano scale, tasks made of the corpus' held-out text stand in for the paper's."
    return Table(name, label, columns, rows, baseline, "columns", name, (note,))


def symbolic_regression() -> Table:
    columns = (
        Column(quantity="constant", title="k of k m1 / r^2", paper="constant"),
        Column(quantity="R2", title="R^2 of |F|", lower_is_better=False),
        Column(quantity="rank", title="rank correlation of |F|", lower_is_better=False),
        *(Column(quantity=f"exponent_{x}", title=f"exponent of {x}") for x in ("r", "m1", "m2")),
        Column(quantity="cosine", title="mean cosine, 8 planets", lower_is_better=False),
    )
    rows = (
        Row("oracle", "oracle", "oracle", control=True),
        Row("softmax", "Softmax", "softmax"),
        Row("lssar", "LSSAR p=15", "lssar"),
        Row("truth", "exact forces", "truth", control=True),
    )
    return Table(
        *("symbolic_regression", "tab:symbolic_regression", columns, rows),
        figure="columns",
        folder="physics",
        pictures="physics-*.png",
    )


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
    edu = edu_runs(scale)
    tables += [
        attention_maps(scale),
        downstream("downstream", "tab:downstream", MAIN_PAIR, "softmax"),
        downstream("downstream_edu", "tab:edu_downstream", edu, None),
        downstream("lambada", "tab:lambada_results", (*MAIN_PAIR, *edu), "softmax"),
        cost(),
        symbolic_regression(),
    ]
    return {table.name: table for table in tables}
