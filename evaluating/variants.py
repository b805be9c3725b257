"""Names the variants of a trained model, for records, tables and figures."""

CURRENT_LENGTH = "L=current"
# Ways to stretch RoPE to the evaluation length, by their setting of the model.
STRETCHES = {"pi": "PI", "ntk": "NTK", "yarn": "YaRN"}
NTK, YARN = STRETCHES["ntk"], STRETCHES["yarn"]


def exponent_name(p: float) -> str:
    return f"p={p:g}"


def alpha_name(alpha: float) -> str:
    return f"alpha={alpha:g}"


def window_name(window: int, sinks: int = 0) -> str:
    """Name a sliding window, with the number of first tokens kept beside it."""
    name = f"window={window}"
    return f"{name}, sinks={sinks}" if sinks else name
