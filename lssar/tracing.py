"""Tells whether tensors hold values now, or a graph, a derivative or a batch is made."""

import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad


def trace_constant(function: Callable) -> Callable:
    """Mark a function that runs while torch.compile traces; the graph gets its result alone.

    This is what torch.compiler.assume_constant_result does, without importing the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def can_look_at(x: Tensor) -> bool:
    """Tell whether a branch may depend on the values of x.

    Not while a graph is made, and not on a GPU, which the host would have to wait for.
    """
    return x.device.type == "cpu" and type(x) is Tensor and not torch.compiler.is_compiling()


def is_transformed() -> bool:
    """Tell whether torch.func or forward-mode AD computes with the tensors of this call."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


@trace_constant
def exporting_to_onnx() -> bool:
    """Tell whether the graph is made for ONNX, in which an operator of ours has no meaning."""
    return "torch.onnx" in sys.modules and torch.onnx.is_in_onnx_export()
