"""ONNX: `attend`, a Llama and an export, run by onnxruntime at another length."""

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="pip install -r requirements-downstream.txt")
pytest.importorskip("onnxruntime", reason="pip install -r requirements-ecosystem.txt")
pytest.importorskip("onnxscript", reason="pip install -r requirements-ecosystem.txt")

import onnxruntime
from eval_helpers import exported_model, tiny_model
from tiny_models import build, tokens

import lssar.hf  # noqa: F401 - registers the mechanisms
from lssar.backends import attend
from lssar.mechanisms import MECHANISMS


class Logits(nn.Module):
    """Wrap a model of transformers as ONNX takes it: tokens in, logits out."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


class Attend(nn.Module):
    def __init__(self, mechanism: str):
        super().__init__()
        self.mechanism = mechanism

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, self.mechanism)


def check(module: nn.Module, example: tuple, inputs: tuple, axis: int, file) -> None:
    """Export with the example, run with the inputs, compare with the module."""
    length = torch.export.Dim("length", min=2, max=4096)
    shapes = tuple({axis: length} for _ in example)
    torch.onnx.export(module, example, file, dynamo=True, dynamic_shapes=shapes, verbose=False)
    session = onnxruntime.InferenceSession(file)
    names = [given.name for given in session.get_inputs()]
    given = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
    (got,) = session.run(None, given)
    with torch.no_grad():
        expected = module(*inputs)
    torch.testing.assert_close(torch.from_numpy(got), expected, rtol=1e-3, atol=1e-4)


def test_attention_is_exported_for_any_length(tmp_path):
    for mechanism in ("lssar", "lssa", "softmax", "ssmax", "sigmoid-logn"):
        example = torch.randn(3, 1, 2, 9, 8).unbind()
        inputs = torch.randn(3, 1, 2, 33, 8).unbind()
        assert mechanism in MECHANISMS
        check(Attend(mechanism).eval(), example, inputs, 2, tmp_path / f"{mechanism}.onnx")


def test_models_are_exported_for_any_length(tmp_path):
    models = {"llama": build("llama", "lssar"), "export": exported_model(tiny_model("lssar"))}
    for name, model in models.items():
        check(Logits(model).eval(), (tokens(1, 9),), (tokens(1, 23),), 1, tmp_path / f"{name}.onnx")
