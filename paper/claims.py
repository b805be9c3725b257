"""What the paper claims, sentence by sentence in its own words, and our own controls beside it.

A claim names the rows that it compares, where, and what is said of them; `verdicts.py` judges it.
"""

import textwrap

from paper.evidence import Evidence
from paper.statistic import AS_GOOD, BETTER, FAILS, HOLDS, OPEN, WORSE
from paper.verdicts import (
    Claim,
    Judged,
    Pair,
    constant_found,
    edge_of_the_sweep,
    far_context_harms,
    judged,
    nearly_constant,
    no_sink,
    unequal_budgets,
)


def each(row: str, wanted: str, others: tuple[str, ...], at=(1,)) -> tuple[Pair, ...]:
    return tuple(Pair(row, wanted, other, at) for other in others)


def versus(rows: tuple[str, ...], wanted: str, other: str = "softmax", at=(1,)) -> tuple[Pair, ...]:
    return tuple(Pair(row, wanted, other, at) for row in rows)


SIGMOIDS = ("sigmoid", "sigmoid-logn", "sigmoid-logn-l1", "sigmoid-l1")
RELUS = ("relu-length", "relu-l1", "relu-shen")
ACTIVATIONS = ("relu-l1", "relu2-l1", "relu6-l1", "gelu-l1", "sigmoid-l1", "mish-l1")
SIZED = tuple(f"edu-{size}" for size in ("small", "middle", "large", "45m", "124m", "355m"))
TASKS = ("acc_norm", "acc", "rouge1", "perplexity", "chrf")
MAIN, APPENDIX = "Sect. 4", "Appendix"

PAPER_CLAIMS = (
    Claim(
        "This novel, two-stage, replacement for self-attention is shown to … dramatically improve "
        "length extrapolation, … at 16× the training length",
        *("Abstract", "headline"),
        versus(("lssar-p15",), BETTER, at=(16,)),
    ),
    Claim(
        "LSSAR maintains a nearly constant validation loss even at 16× the training token length",
        *("Introduction", "headline"),
        rule=nearly_constant("lssar-p15"),
    ),
    Claim(
        "We show that this novel attention mechanism [LSSA] outperforms conventional Softmax "
        "attention",
        *("Abstract", "headline"),
        versus(("lssa",), BETTER, at=(1, 2, 4, 8)),
    ),
    Claim(
        "At an inference sequence length of 1K, all attention variants perform similarly, with "
        "only slight differences in validation loss.",
        *(MAIN, "softmax_free"),
        versus(("ssmax", *SIGMOIDS, *RELUS, "lssa"), AS_GOOD),
    ),
    Claim(
        "SSMax achieves the lowest validation loss [at 1K]",
        *(MAIN, "softmax_free"),
        each("ssmax", BETTER, ("softmax", *SIGMOIDS, *RELUS, "lssa")),
    ),
    Claim(
        "Sigmoid (b = −log N, l1-norm) and LSSA also perform slightly better than the standard "
        "Softmax attention [at 1K]",
        *(MAIN, "softmax_free"),
        versus(("sigmoid-logn-l1", "lssa"), BETTER),
    ),
    Claim(
        "Sigmoid attention shows significant performance decline at longer sequences, with "
        "validation loss rising sharply at 8K tokens.",
        *(MAIN, "softmax_free"),
        versus(("sigmoid", "sigmoid-logn"), WORSE, at=(8,)),
    ),
    Claim(
        "ReLU-based attention variants also experience notable performance decline with longer "
        "sequences",
        *(MAIN, "softmax_free"),
        versus(RELUS, WORSE, at=(8,)),
    ),
    Claim(
        "the length extrapolation ability provided by the re-weighting can improve the performance "
        "of all the tested attention mechanisms",
        *(MAIN, "softmax_free"),
        (
            Pair("softmax-p3", BETTER, "softmax", (8,)),
            Pair("sigmoid-logn-l1-p15", BETTER, "sigmoid-logn-l1", (8,)),
            Pair("lssar-p15", BETTER, "lssa", (8,)),
        ),
    ),
    Claim(
        "For Softmax, performance was improved slightly using p=3, but was harmed when using p=15.",
        *(MAIN, "softmax_free"),
        (
            Pair("softmax-p3", BETTER, "softmax", (1, 2, 4, 8)),
            Pair("softmax-p15", WORSE, "softmax", (1, 2, 4, 8)),
        ),
    ),
    Claim(
        "For the other attention mechanisms, p=3 was most effective for sequence lengths of 1K",
        *(MAIN, "softmax_free"),
        (
            *each("lssar-p3", BETTER, ("lssa", "lssar-p15")),
            *each("sigmoid-logn-l1-p3", BETTER, ("sigmoid-logn-l1", "sigmoid-logn-l1-p15")),
        ),
    ),
    Claim(
        "For p=15, LSSAR achieves the best long-context performance among the tested variants",
        *(MAIN, "softmax_free"),
        each(
            "lssar-p15",
            BETTER,
            (
                *("softmax", "ssmax", *SIGMOIDS, *RELUS, "lssa", "lssar-p3", "softmax-p3"),
                *("softmax-p15", "sigmoid-logn-l1-p3", "sigmoid-logn-l1-p15"),
            ),
            (8,),
        ),
    ),
    Claim(
        "inverting the Softmax outputs by multiplying them by negative one resulted in a "
        "negligible change in validation loss",
        *(APPENDIX, "modified_scores"),
        versus(("softmax-inverse",), AS_GOOD),
    ),
    Claim(
        "We also re-centred the attention scores by subtracting the row-wise mean … This led to a "
        "minor increase in loss. However, when we subsequently scaled these re-centred scores by "
        "the l1-norm, performance was almost fully restored.",
        *(APPENDIX, "modified_scores"),
        (
            Pair("softmax-recentred", WORSE, "softmax"),
            Pair("softmax-recentred-l1", AS_GOOD, "softmax"),
        ),
    ),
    Claim(
        "Softmax's effectiveness comes from the combination of a nonlinear transformation and "
        "subsequent normalisation",
        *(APPENDIX, "decomposition"),
        each("softmax", BETTER, ("identity", "exp", "identity-l1")),
    ),
    Claim(
        "While better than the linear baseline, Scenario II [exp without the l1-norm] still lags "
        "behind the full Softmax.",
        *(APPENDIX, "decomposition"),
        (Pair("exp", BETTER, "identity"), Pair("exp", WORSE, "softmax")),
    ),
    Claim(
        "all activation functions, except for Softplus, result in poorer validation loss values "
        "compared to the standard attention mechanism",
        *(APPENDIX, "activations"),
        versus(ACTIVATIONS, WORSE),
    ),
    Claim(
        "Softplus, in particular, achieves the lowest validation loss.",
        *(APPENDIX, "activations"),
        each("softplus-l1", BETTER, (*ACTIVATIONS, "softmax")),
    ),
    Claim(
        "[Softmax with re-weighting] suffers from severe gradient explosion issues as p increases "
        "to p=15 and beyond.",
        *(APPENDIX, "p_sweep"),
        each("softmax-p15", WORSE, ("softmax-p3",), (1, 2, 4, 8, 16)),
    ),
    Claim(
        "Increasing p initially … improves validation loss, with the best performance in this "
        "sweep observed around p=15.",
        *(APPENDIX, "p_sweep"),
        each("lssar-p15", BETTER, ("lssar-p1", "lssar-p3", "lssar-p5"), (16,)),
        caveat=edge_of_the_sweep,
    ),
    Claim(
        "LSSAR succeeds far beyond its training length while standard attention fails completely "
        "[at passkey retrieval].",
        *("Introduction", "passkey"),
        versus(("lssar-p15",), BETTER, at=(1.5, 2, 4)),
        caveat=unequal_budgets,
    ),
    Claim(
        "At all three target lengths, the LSSAR+PI model achieves lower validation loss than the "
        "corresponding base LSSAR checkpoint.",
        *(APPENDIX, "pi"),
        versus(("pi",), BETTER, "base", (2, 4, 8)),
    ),
    Claim(
        "at 16× extrapolation, α=0.1 reduces the validation loss from 3.45 to 3.31",
        *(APPENDIX, "adaptive_p"),
        versus(("alpha=0.1",), BETTER, "lssar-p15", (16,)),
    ),
    Claim(
        "LSSAR shows consistent improvements over the Softmax baseline across the tested model "
        "sizes.",
        *("Discussion", "scaling_edu"),
        tuple(Pair(f"{size}-lssar", BETTER, f"{size}-softmax", (16,)) for size in SIZED),
    ),
    Claim(
        "LSSAR effectively mitigates the attention sink phenomenon",
        *("Introduction", "attention_maps"),
        versus(("lssar-p15",), BETTER, at=("sink",)),
        caveat=no_sink,
    ),
    Claim(
        "Downstream evaluations confirm that these architectural improvements translate into "
        "superior performance on a range of tasks.",
        *("Conclusion", "downstream"),
        versus(("lssar-p15",), BETTER, at=TASKS),
    ),
    Claim(
        "LSSAR is noticeably slower at inference and uses substantially more memory during "
        "training than standard attention.",
        *("Discussion", "cost"),
        versus(("lssar",), WORSE, at=("eval_ms", "train_MB")),
    ),
    Claim(
        "Symbolic regression identifies an inverse-square form (F ∝ m/r²) from LSSAR's outputs, "
        "whereas standard attention fails to match this physical structure.",
        *("Introduction", "symbolic_regression"),
        rule=constant_found,
    ),
)

WINDOW = Claim(
    "A sliding window of the training length, put on softmax at evaluation, is better at 16x than "
    "softmax and than LSSAR.",
    *("", "headline"),
    each("softmax-window", BETTER, ("softmax", "lssar-p15"), (16,)),
)
FAR_CONTEXT = Claim(
    "With all of 16x the training length before it, each model predicts worse than with the last "
    "training length alone.",
    *("", "headline"),
    rule=far_context_harms,
)
OUR_CONTROLS = (
    WINDOW,
    FAR_CONTEXT,
    Claim(
        "LSSAR p=15 is as good as softmax at the training length.",
        *("", "headline"),
        versus(("lssar-p15",), AS_GOOD),
    ),
    Claim(
        "It is PI that helps, not the fine-tuning: with PI the loss is lower than after the same "
        "fine-tuning without it.",
        *("", "pi"),
        versus(("pi",), BETTER, "no-pi", (2, 4, 8)),
    ),
    Claim(
        "LSSAR retrieves more passkeys beyond the training length than softmax with a sliding "
        "window.",
        *("", "passkey"),
        each("lssar-p15", BETTER, ("softmax-window",), (1.5, 2, 4)),
        caveat=unequal_budgets,
    ),
)


def judge_all(evidence: Evidence) -> tuple[list[Judged], list[Judged]]:
    """The paper's claims and our controls."""
    return tuple([judged(c, evidence) for c in group] for group in (PAPER_CLAIMS, OUR_CONTROLS))


# --- three sentences -----------------------------------------------------------------------------

FINDINGS = (
    (
        PAPER_CLAIMS[0],
        {
            HOLDS: "At 16 times the training length LSSAR has degraded less than softmax",
            FAILS: "At 16 times the training length LSSAR has not degraded less than softmax",
            OPEN: "Whether LSSAR degrades less than softmax beyond the training length is open",
        },
    ),
    (
        WINDOW,
        {
            HOLDS: "Softmax with a sliding window of the training length at evaluation beats both",
            FAILS: "A sliding window of the training length does not beat both",
            OPEN: "Whether a sliding window of the training length beats both is open",
        },
    ),
    (
        FAR_CONTEXT,
        {
            HOLDS: "No model gains from far context: all predict worse with it than without",
            FAILS: "Far context does not harm every model",
            OPEN: "Whether any model gains from far context is open",
        },
    ),
)


def findings(evidence: Evidence) -> list[str]:
    """What was found, by the same judgements; nothing where nothing was measured."""
    sentences = []
    for claim, words in FINDINGS:
        found = judged(claim, evidence)
        if all(point.found.n for point in found.points):
            closest = min(found.points, key=lambda point: abs(point.found.mean))
            sentences.append(f"{words[found.verdict]} ({closest.text}).")
    return sentences


def show_claims(evidence: Evidence) -> str:
    """Every claim with its verdict, and what would settle an open one, for the terminal."""
    lines = []
    for title, group in zip(
        ("the paper's claims", "our controls"), judge_all(evidence), strict=True
    ):
        lines.append(f"\n{title}")
        for found in group:
            text = textwrap.shorten(found.claim.text, 84, placeholder=" …")
            lines.append(f"  {found.verdict:14s} {text}")
            lines += [f"{'':17s}{found.settles}"] if found.settles else []
    return "\n".join(lines)
