"""The paper's experiments as values: which runs there are, and which tables and figures use them.

A `Run` is one model to train, a `Table` says where each of its numbers is to be found: the metric
of a run, or of a variant of it, at a multiple of the training length. Tables share runs by key.
Both exist at two scales, `nano` and `paper`, which differ in configs and data only.
"""

from dataclasses import dataclass, field, replace

from evaluation import AS_TRAINED

ALPHAS = (0.1, 0.2, 0.3, 0.4, 0.5)
PI_FACTORS = (2, 4, 8)
ALL_FACTORS = (1, 2, 4, 8, 16)
SWEPT_P = (1, 3, 5, 10, 15, 20)
HEADLINE = ("softmax", "ssmax", "lssa", "lssar-p3", "lssar-p15")


@dataclass(frozen=True)
class Corpus:
    arguments: tuple[str, ...]  # of data/prepare.py
    tokens: float  # as prepared

    @property
    def bytes(self) -> float:
        return 2 * self.tokens


@dataclass(frozen=True)
class Scale:
    name: str
    train_length: int
    passkey_train_length: int
    eval_tokens: int  # targets of the loss at every length
    spread: bool  # targets from all over the validation set, or its beginning
    unit: str
    seeds: tuple[int, ...]  # of the runs that are repeated; the others have the first alone
    corpora: dict[str, Corpus]  # by directory
    tokens_per_second: float | None = None  # of training on a CPU, to plan with
    downstream: str = "paper"  # task set

    def length(self, factor: float) -> int:
        return int(factor * self.train_length)

    def passkey_length(self, factor: float) -> int:
        return int(factor * self.passkey_train_length)


SCALES = {
    "nano": Scale(
        name="nano",
        train_length=128,
        passkey_train_length=384,
        eval_tokens=131_072,
        spread=True,
        unit="nats per byte",
        seeds=(0, 1, 2),
        corpora={
            "corpora/stdlib": Corpus(("stdlib",), 12.1e6),
            "corpora/passkey": Corpus(("passkey",), 14e6),
        },
        tokens_per_second=15_000,  # two runs side by side on two cores, with their validation
        downstream="nano",
    ),
    "paper": Scale(
        name="paper",
        train_length=1024,
        passkey_train_length=1024,
        eval_tokens=10_485_760,
        spread=False,
        unit="nats per token",
        seeds=(0,),
        corpora={
            "corpora/fineweb10B": Corpus(("fineweb",), 10.36e9),
            "corpora/fineweb-edu": Corpus(
                ("fineweb-edu", "--sample", "sample-100BT", "--max-tokens", "32B"), 32e9
            ),
        },
    ),
}


# --- runs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    key: str
    config: str  # a file of configs/
    overrides: tuple[str, ...] = ()
    init_from: str | None = None  # the key of the run whose weights it starts from
    factors: tuple[int, ...] = ALL_FACTORS  # lengths to evaluate at, over the training length
    windows: bool = False  # with a sliding window as well
    alphas: bool = False  # and, the first seed, with adaptive p_i


def attention(name: str, p: float | None = None, numerics: str | None = None) -> tuple[str, ...]:
    settings = {"name": name, "p": p, "numerics": numerics}
    return tuple(f"--attention.{k}={v}" for k, v in settings.items() if v is not None)


# What the 27 FineWeb runs are: key -> mechanism and p.
MECHANISM_OF = {
    **{
        name: (name, None)
        for name in (
            *("softmax", "ssmax", "sigmoid", "sigmoid-logn", "sigmoid-logn-l1", "sigmoid-l1"),
            *("relu-length", "relu-l1", "relu-shen", "lssa", "softmax-inverse"),
            *("softmax-recentred", "softmax-recentred-l1", "identity", "exp", "identity-l1"),
            *("relu2-l1", "relu6-l1", "gelu-l1", "softplus-l1", "mish-l1"),
        )
    },
    **{
        f"{stem}-p{p}": (mechanism, p)
        for p in (3, 15)
        for stem, mechanism in (
            ("softmax", "softmax-reweighted"),
            ("sigmoid-logn-l1", "sigmoid-logn-l1-reweighted"),
            ("lssar", "lssar"),
        )
    },
}
# In tables of the loss at the training length alone.
ONE_LENGTH_RUNS = (
    *("softmax-inverse", "softmax-recentred", "softmax-recentred-l1", "identity", "exp"),
    *("identity-l1", "relu2-l1", "relu6-l1", "gelu-l1", "softplus-l1", "mish-l1"),
)
SWEEP_STEMS = {"softmax": "softmax-reweighted", "lssar": "lssar"}

# Config files that differ between the scales.
MAIN = {"nano": "nano-softmax", "paper": "gpt2-124m-softmax"}
FINETUNE = {"nano": "nano-lssar-pi-{}x", "paper": "gpt2-124m-lssar-pi-{}k"}
SIZES = {
    "nano": {"small": "nano-small", "middle": None, "large": "nano-large"},
    "paper": {"45m": "gpt2-45m-edu", "124m": "gpt2-124m-edu", "355m": "gpt2-355m-edu"},
}


def all_runs(scale: str) -> dict[str, Run]:
    main = MAIN[scale]
    found = [
        Run(
            key,
            main,
            attention(name, p),
            factors=(1,) if key in ONE_LENGTH_RUNS else ALL_FACTORS,
            windows=key in ("softmax", "lssar-p15"),
            alphas=key == "lssar-p15",
        )
        for key, (name, p) in MECHANISM_OF.items()
    ]
    found += [
        Run(f"{stem}-p{p}", main, attention(name, p))
        for stem, name in SWEEP_STEMS.items()
        for p in SWEPT_P
        if f"{stem}-p{p}" not in MECHANISM_OF
    ]
    # The collapse of softmax with p = 15 may be one of arithmetic: x**15 written out overflows.
    found.append(
        Run("softmax-p15-naive", main, attention("softmax-reweighted", 15, numerics="naive"))
    )
    for factor in PI_FACTORS:
        config = FINETUNE[scale].format(factor)
        found += [
            Run(f"pi-{factor}x", config, (), "lssar-p15", (factor,)),
            Run(f"no-pi-{factor}x", config, ("--model.interpolation=1",), "lssar-p15", (factor,)),
        ]
    found += [
        Run(f"edu-{size}-{name}", f"{config}-{name}", windows=name == "softmax")
        for size, config in SIZES[scale].items()
        if config is not None
        for name in ("softmax", "lssar")
    ]
    if scale == "nano":
        lssar = Run("passkey-lssar", "nano-passkey-softmax", attention("lssar", 15))
        found += [
            Run("passkey-softmax", "nano-passkey-softmax", attention("softmax")),
            lssar,
            replace(lssar, key="passkey-lssar-more", init_from=lssar.key),
        ]
    return {run.key: run for run in found}


def size_run(scale: str, size: str, name: str) -> str:
    """The run of a size and a mechanism; the middle nano size is the main nano model."""
    if SIZES[scale][size] is None:
        return {"softmax": "softmax", "lssar": "lssar-p15"}[name]
    return f"edu-{size}-{name}"


def run_seeds(scale: Scale, key: str, wanted: tuple[int, ...] | None) -> tuple[int, ...]:
    """The seeds asked for, or the scale's own: the first alone, and all of them in the comparisons
    that are about small differences: the headline and PI."""
    if wanted is not None:
        return wanted
    several = key in HEADLINE or key.startswith(("pi-", "no-pi-"))
    return scale.seeds if several else scale.seeds[:1]


# --- tables --------------------------------------------------------------------------------------


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
