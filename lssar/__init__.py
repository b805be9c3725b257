"""Softplus attention with re-weighting, and every attention mechanism it is compared with.

    from lssar import attend
    out = attend(q, k, v)  # LSSAR, causal; q, k, v: (batch, heads, length, head_dim)

Names are imported on first use: `import lssar` alone does not import torch.
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "MECHANISMS",
    "Mechanism",
    "attend",
    "attention_weights",
    "backend",
    "get_mechanism",
    "spans",
]

if TYPE_CHECKING:
    from lssar import spans
    from lssar.backends import attend, backend
    from lssar.mechanisms import MECHANISMS, Mechanism, get_mechanism
    from lssar.reference import attention_weights
else:
    _HOMES = {
        "MECHANISMS": "mechanisms",
        "Mechanism": "mechanisms",
        "attend": "backends",
        "attention_weights": "reference",
        "backend": "backends",
        "get_mechanism": "mechanisms",
    }
    # Names of the first release's top level, which go with the next one.
    _MOVED = {
        "BACKENDS": "backends",
        "OVERRIDES": "mechanisms",
        "UserError": "errors",
        "attend_padded": "backends",
        "choose_backend": "backends",
        "token_positions": "spans",
        "used_backend": "backends",
    }

    def __getattr__(name: str) -> Any:
        if name == "spans":
            return importlib.import_module("lssar.spans")
        if name in _HOMES:
            found = getattr(importlib.import_module(f"lssar.{_HOMES[name]}"), name)
            globals()[name] = found
            return found
        if name in _MOVED:
            home = f"lssar.{_MOVED[name]}"
            text = f"lssar.{name} is now {home}.{name}; the old name goes with the next release"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return getattr(importlib.import_module(home), name)
        raise AttributeError(f"module 'lssar' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return [*__all__, "__version__"]
