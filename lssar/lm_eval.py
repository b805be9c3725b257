"""Models of transformers that use our mechanisms, for lm-evaluation-harness.

    lm_eval --model lssar --model_args pretrained=FOLDER --tasks TASKS

The harness' own model `hf`, with the mechanisms registered. The harness knows it once the package
is installed (lm_eval_plugin/); in the repository, `python -m lssar.lm_eval` is the same command. An
exported checkpoint brings its own code: `--model hf` takes it, with
`trust_remote_code=True`, and so does this one. Its tokeniser begins a text with the end-of-text
token; `add_bos_token=False` gives contexts as they are, and the scores of downstream.py.
"""

import signal

# What follows takes seconds to import: Ctrl-C ends it without a traceback. It may be ignored.
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import model_registry
from lm_eval.models.huggingface import HFLM

import lssar.hf  # noqa: F401 - registers the mechanisms
from lssar.errors import UserError


class LssarLM(HFLM):
    def __init__(self, pretrained: str | None = None, **options):
        if pretrained is None:
            given = ", ".join(f"{key}={value}" for key, value in options.items())
            raise UserError(
                f"--model lssar needs pretrained=FOLDER, and was given {given}; a run of the "
                "repository is exported by export_hf.py, or evaluated by downstream.py"
            )
        super().__init__(pretrained, **options)


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "lssar" not in model_registry:
        model_registry.register("lssar", target="lssar.lm_eval:LssarLM")
    cli_evaluate()
