"""Small checkpoints and token sets for the tests of the evaluation scripts."""

from pathlib import Path

import numpy as np
import torch

from data.shards import header_bytes
from lssar.mechanisms import get_mechanism
from model import GPT, preset
from training.checkpoint import CheckpointInfo, save_model


def tiny_model(attention: str = "softmax", train_length: int = 16, seed: int = 0, **changes) -> GPT:
    """Return a random model whose attention is sharp enough that mechanism and context matter."""
    torch.manual_seed(seed)
    mechanism = get_mechanism(attention, train_length=train_length)
    shape = {"layers": 2, "heads": 2, "width": 24} | changes
    model = GPT(preset("nano", mechanism, **shape)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
    return model


def exported_model(model: GPT):
    """Return the same weights as a model of transformers."""
    from evaluating.hf_model import LssarConfig, LssarForCausalLM

    config = LssarConfig(**model.config.to_dict(), train_length=16)
    outside = LssarForCausalLM(config).eval()
    outside.model.gpt.load_state_dict(model.state_dict())
    return outside


def write_checkpoint(directory: Path, model: GPT, *, run: str = "", **info) -> Path:
    directory.mkdir(parents=True)
    train_length = model.config.attention.train_length
    values = {"run": run or directory.name, "step": 7, "train_length": train_length} | info
    save_model(directory, model, CheckpointInfo(**values))
    return directory


def write_tokens(directory: Path, count: int, vocab_size: int = 257, seed: int = 0) -> Path:
    """Write a validation set without structure, in two shards of uneven size."""
    directory.mkdir(parents=True)
    tokens = np.random.default_rng(seed).integers(0, vocab_size, count).astype("<u2")
    cut = count // 3 + 1
    for index, part in enumerate((tokens[:cut], tokens[cut:])):
        file = directory / f"set_val_{index:06d}.bin"
        file.write_bytes(header_bytes(len(part)) + part.tobytes())
    return directory


def small_gpt(attention="lssar", **changes):
    """Return two layers with weights large enough that attention is far from uniform."""
    sizes = {"layers": 2, "heads": 2, "width": 40, "vocab_size": 61, "vocab_rows": 64} | changes
    model = GPT(preset("nano", attention, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(8)
    return model
