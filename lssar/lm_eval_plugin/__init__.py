"""`lm_eval --model lssar`, for lm-evaluation-harness as it is installed.

The harness (0.4.13) looks for no models of other packages. torch does look for extensions, at the
end of its import, in the entry points `torch.backends`; the wheel names `register` there, and holds
this folder as the package `lssar_lm_eval`, which no other folder hides: torch could not be imported
without it. It does nothing unless the harness is what imports torch, and nothing at all with
TORCH_DEVICE_BACKEND_AUTOLOAD=0.
"""

import contextlib
import sys


def register() -> None:
    """Add the model to the harness' registry, not to be imported before it is asked for."""
    if "lm_eval" not in sys.modules:
        return
    # Of another version anything may differ: it then says that it knows no such model, where an
    # error here would say that torch cannot be imported.
    with contextlib.suppress(Exception):
        import lm_eval.models  # noqa: F401 - its own, which it adds only to an empty registry
        from lm_eval.api.registry import model_registry

        if "lssar" not in model_registry:
            model_registry.register("lssar", target="lssar.lm_eval:LssarLM")
