"""Adds models of transformers that use our mechanisms to lm-evaluation-harness.

    lssar-lm-eval --model lssar --model_args pretrained=FOLDER --tasks TASKS

This is the harness' own command with one more model, `lssar`: its model `hf` with our mechanisms
registered. `python -m lssar.lm_eval` is the same command where the package is not installed. In
Python, `import lssar.lm_eval` makes `lm_eval.simple_evaluate(model="lssar", ...)` work. A harness
that reads the entry points `lm_eval.models` knows the model from its own command too.

An exported checkpoint brings its own code: `--model hf` takes it, with `trust_remote_code=True`,
and so does this one. Its tokeniser begins a text with the end-of-text token; `add_bos_token=False`
gives contexts as they are, and the scores of downstream.py.
"""

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import model_registry
from lm_eval.models.huggingface import HFLM  # and with it the harness registers its own models

import lssar.hf  # noqa: F401 - registers the mechanisms
from lssar.errors import UserError


class LssarLM(HFLM):
    """Makes the harness' model `hf`, where `pretrained` may use one of our mechanisms."""

    def __init__(self, pretrained: str | None = None, **options):
        if pretrained is None:
            given = ", ".join(f"{key}={value}" for key, value in options.items())
            raise UserError(
                f"--model lssar needs pretrained=FOLDER, and was given {given}; a run of the "
                "repository is exported by export_hf.py, or evaluated by downstream.py"
            )
        super().__init__(pretrained, **options)


if "lssar" not in model_registry:
    model_registry.register("lssar", target="lssar.lm_eval:LssarLM")


def main() -> None:
    """Run the harness' command."""
    cli_evaluate()


if __name__ == "__main__":
    main()
