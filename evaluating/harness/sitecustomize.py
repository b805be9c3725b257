"""PYTHONPATH=evaluating/harness lm_eval --model lssar --model_args checkpoint=RUN --tasks TASKS

Makes the model `lssar` known to lm-evaluation-harness' own command, which has no other way to add
one: Python imports a module of this name when it starts.
"""

import contextlib
import sys
from pathlib import Path

with contextlib.suppress(ImportError):  # every Python started with this path reads this file
    import lm_eval.models  # noqa: F401 - the harness lists its own models only if there are none
    from lm_eval.api.registry import model_registry

    sys.path.append(str(Path(__file__).resolve().parents[2]))
    model_registry.register("lssar", target="evaluating.lm_eval_model:CheckpointLM")
