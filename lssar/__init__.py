"""Softplus attention with re-weighting, and every attention mechanism it is compared with.

    from lssar import attend
    out = attend(q, k, v, "lssar")  # q, k, v: (batch, heads, length, head_dim), causal

Names are imported on first use: `import lssar` alone does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lssar import spans
    from lssar.backends import BACKENDS, attend, attend_padded, choose_backend, used_backend
    from lssar.errors import UserError
    from lssar.mechanisms import MECHANISMS, OVERRIDES, Mechanism, get_mechanism
    from lssar.reference import attention_weights
    from lssar.spans import token_positions

__version__ = "0.1.0"

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
    homes = (
        "errors",
        "mechanisms",
        "spans",
        "reference",
        "backends",
    )  # the first two need no torch
    for home in homes if name in __all__ else ():
        module = importlib.import_module(f"{__name__}.{home}")
        if name == home or hasattr(module, name):
            return getattr(module, name, module)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
