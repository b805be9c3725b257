"""Softplus attention with re-weighting, and every attention mechanism it is compared with.

    from lssar import attend
    out = attend(q, k, v, "lssar")  # q, k, v: (batch, heads, length, head_dim), causal

Names are imported on first use: `import lssar` alone does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lssar import spans
    from lssar.backends import BACKENDS, attend, choose_backend, used_backend
    from lssar.errors import UserError
    from lssar.mechanisms import MECHANISMS, OVERRIDES, Mechanism, get_mechanism
    from lssar.reference import attention_weights
    from lssar.spans import attend_padded, token_positions

__version__ = "0.1.0"

_HOME = {
    **dict.fromkeys(("MECHANISMS", "OVERRIDES", "Mechanism", "get_mechanism"), "mechanisms"),
    "attention_weights": "reference",
    **dict.fromkeys(("BACKENDS", "attend", "choose_backend", "used_backend"), "backends"),
    **dict.fromkeys(("attend_padded", "token_positions"), "spans"),
    "UserError": "errors",
    "spans": "spans",
}
__all__ = [
    "BACKENDS",
    "MECHANISMS",
    "OVERRIDES",
    "Mechanism",
    "UserError",
    "attend",
    "attend_padded",
    "attention_weights",
    "choose_backend",
    "get_mechanism",
    "spans",
    "token_positions",
    "used_backend",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_HOME[name]}")
    return module if name == _HOME[name] else getattr(module, name)
