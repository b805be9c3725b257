"""Which metrics of which downstream tasks the tables show, and in what units."""

PER_CENT = ("acc", "acc_norm", "exact_match")
LOWER_IS_BETTER = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")

# title, the paper's tables of it, and its columns: task, metric, heading
LAYOUTS = (
    (
        "zero-shot tasks, the paper's layout: normalised accuracy (MMLU: accuracy), ROUGE-1",
        ("tab:downstream", "tab:edu_downstream"),
        (
            ("arc_easy", "acc_norm", "ARC-E"),
            ("arc_challenge", "acc_norm", "ARC-C"),
            ("hellaswag", "acc_norm", "HellaSwag"),
            ("piqa", "acc_norm", "PIQA"),
            ("mmlu", "acc", "MMLU"),
            ("sciq", "acc_norm", "SciQ"),
            ("scrolls_summscreenfd", "rouge1", "SummScreen"),
        ),
    ),
    (
        "LAMBADA",
        ("tab:lambada_results",),
        (
            ("lambada_openai", "acc", "Accuracy"),
            ("lambada_openai", "perplexity", "Perplexity"),
        ),
    ),
    (
        "nano tasks, of the corpus' held-out text",
        (),
        (
            ("nano_cloze", "acc", "cloze"),
            ("nano_cloze", "perplexity", "cloze ppl"),
            ("nano_continuation", "acc_norm", "continuation"),
            ("nano_line", "chrf", "line chrF"),
        ),
    ),
)
