"""The models of the paper: the two scales, which runs there are, and with which seeds.

A `Run` is one model to train. The scales, `nano` and `paper`, differ in configs and data only.
"""

from dataclasses import dataclass, replace

ALPHAS = (0.1, 0.2, 0.3, 0.4, 0.5)
PI_FACTORS = (2, 4, 8)
ALL_FACTORS = (1, 2, 4, 8, 16)
SWEPT_P = (1, 3, 5, 10, 15, 20)
HEADLINE = ("softmax", "ssmax", "lssa", "lssar-p3", "lssar-p15")
MAIN_PAIR = ("softmax", "lssar-p15")


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


def edu_runs(scale: str) -> tuple[str, ...]:
    return tuple(size_run(scale, s, n) for s in SIZES[scale] for n in ("softmax", "lssar"))


def run_name(key: str, seed: int) -> str:
    return f"{key}-s{seed}"


def run_seeds(scale: Scale, key: str, wanted: tuple[int, ...] | None) -> tuple[int, ...]:
    """The seeds asked for, or the scale's own: the first alone, and all of them in the comparisons
    that are about small differences: the headline and PI."""
    if wanted is not None:
        return wanted
    several = key in HEADLINE or key.startswith(("pi-", "no-pi-"))
    return scale.seeds if several else scale.seeds[:1]
