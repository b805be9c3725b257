"""PYTHONPATH=evaluating/harness lm_eval --model lssar --model_args checkpoint=RUN --tasks TASKS

Makes the model `lssar` known to lm-evaluation-harness' own command, which has no other door for it:
Python imports a module of this name when it starts. Nothing happens until lm_eval is imported.
"""

import importlib.abc
import importlib.util
import sys
from pathlib import Path

REPOSITORY = str(Path(__file__).resolve().parents[2])
MODEL = "evaluating.lm_eval_model:CheckpointLM"


class AfterModels(importlib.abc.MetaPathFinder):
    """Adds the model right after lm_eval has listed its own."""

    def find_spec(self, name, path, target=None):
        if name != "lm_eval.models":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def run_and_add(module):
            run(module)
            from lm_eval.api.registry import model_registry

            sys.path.append(REPOSITORY)
            model_registry.register("lssar", target=MODEL)

        spec.loader.exec_module = run_and_add
        return spec


sys.meta_path.insert(0, AfterModels())
