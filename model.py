"""Defines GPT-2 with RoPE and any attention mechanism of the paper.

    model = GPT(preset("124m", "lssar"))

Pre-LN blocks, tied embeddings, biases, GPT-2's initialisation. The model works at any length: RoPE
is computed on demand, and the row count N of the mechanisms is the number of keys that a query
sees, with and without a KV cache. The settings in which layers can differ are one `Layer` each
(modelling/config.py).
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from attention import Attention
from lssar.errors import UserError
from lssar.spans import document_starts
from modelling.cache import KVCache
from modelling.config import PRESETS, WEIGHTS_VERSION, Layer, ModelConfig, preset
from modelling.losses import linear_cross_entropy, token_losses
from modelling.positions import Rope, rope_at

__all__ = ["GPT", "PRESETS", "WEIGHTS_VERSION", "Block", "Layer", "ModelConfig", "preset", "sample"]


class Block(nn.Module):
    """Computes one block of GPT-2: attention, then the MLP, each on normalised inputs."""

    def __init__(self, width: int, heads: int, layer: Layer, number: int):
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads, layer, number)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(
        self,
        x: Tensor,
        rope: Rope | None = None,
        cache: KVCache | None = None,
        first: Tensor | None = None,
    ) -> Tensor:
        x = x + self.attention(self.norm_attention(x), rope, cache, first)
        return x + self.mlp_out(F.gelu(self.mlp_in(self.norm_mlp(x))))


def make_blocks(config: ModelConfig) -> nn.ModuleList:
    """Make one block for each layer of the config."""
    layers = enumerate(config.all_layers)
    blocks = [Block(config.width, config.heads, layer, number) for number, layer in layers]
    return nn.ModuleList(blocks)


def initialise(model: nn.Module) -> None:
    """Draw GPT-2's weights: N(0, 0.02), over sqrt(2 layers) where a block adds to its input."""
    residual = 0.02 / math.sqrt(2 * len(model.blocks))

    def draw(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
        if isinstance(module, Block):
            nn.init.normal_(module.attention.proj.weight, std=residual)
            nn.init.normal_(module.mlp_out.weight, std=residual)

    model.apply(draw)


class GPT(nn.Module):
    """Computes GPT-2: embedding, blocks, and a head tied to the embedding."""

    config_type = ModelConfig

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_rows, config.width)  # the head is tied to it
        self.blocks = make_blocks(config)
        self.norm = nn.LayerNorm(config.width)
        initialise(self)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the mean loss with targets, else the logits (B, L, vocab_size)."""
        hidden = self.hidden(tokens)
        if targets is None:
            return self.logits(hidden)
        return linear_cross_entropy(hidden, self.embedding.weight, targets, self.config.vocab_size)

    def hidden(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Return the final hidden states (B, L, width); with a cache, of the tokens after it."""
        length = tokens.shape[1]
        if cache is None:
            positions = torch.arange(length, device=tokens.device)
        else:
            positions = cache.positions(length, tokens.device)
        first = None  # where each token's document starts
        if self.config.documents:
            starts = tokens == self.config.end_of_text
            first = document_starts(starts) if cache is None else cache.document_starts(starts)
        rope = self.rope(positions)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rope, cache, first)
        if cache is not None:
            cache.length += length
        return self.norm(x)

    def rope(self, positions: Tensor) -> Rope | None:
        """Return RoPE at the tokens' positions (L,) or (B, L); None if no layer has it."""
        if not any(block.attention.positions == "rope" for block in self.blocks):
            return None
        c = self.config
        m = c.attention
        settings = (c.head_dim, c.interpolation, c.scaling, m.train_length)
        cos, sin = rope_at(positions, *settings)
        if not m.sinks:
            return Rope(cos, sin)
        # The sinks appear to queries right before the window.
        offsets = (m.window + m.sinks - 1 - positions).clamp(max=0)
        return Rope(cos, sin, *rope_at(offsets, *settings))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return (..., vocab_size) in float32, without the padding of the table."""
        return F.linear(hidden, self.embedding.weight)[..., : self.config.vocab_size].float()

    @torch.no_grad()
    def token_losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of every token, in the shape of the targets, without gradients."""
        hidden = self.hidden(tokens)
        return token_losses(hidden, self.embedding.weight, targets, self.config.vocab_size)

    def configure(self, **changes) -> "GPT":
        """Change fields of the config, such as `interpolation`; the weights stay."""
        config = replace(self.config, **changes)
        for block, layer in zip(self.blocks, config.all_layers, strict=True):
            refuse_other_parameters(block.attention, layer)
        for block, layer in zip(self.blocks, config.all_layers, strict=True):
            block.attention.configure(layer)
        self.config = config
        return self

    def use_backend(self, name: str) -> "GPT":
        """Compute attention with one of `lssar.backends.BACKENDS`, or "auto"."""
        for block in self.blocks:
            block.attention.backend = name
        return self

    def parameter_count(self) -> int:
        """Count the parameters; the tied head counts once."""
        return sum(p.numel() for p in self.parameters())

    def weights_per_token(self) -> int:
        """Count the weights that every token is multiplied by: of linear layers and the head."""
        linear = [m.weight for m in self.modules() if isinstance(m, nn.Linear)]
        return sum(weight.numel() for weight in [*linear, self.embedding.weight])

    @torch.inference_mode()
    def stream(self, prompt: Tensor, max_new_tokens: int, stop=(), **sampling) -> Iterator[Tensor]:
        """Yield the next token of each sequence (B,), one step at a time, through a KV cache.

        `sampling`: the options of `sample`. A sequence repeats its stop token once it has produced
        one of them; the stream ends when all have, or after max_new_tokens.
        """
        cache = KVCache(prompt.shape[1] + max_new_tokens)
        tokens = prompt
        last = prompt[:, -1]
        finished = torch.zeros_like(last, dtype=torch.bool)
        for _ in range(max_new_tokens):
            logits = self.logits(self.hidden(tokens, cache)[:, -1])
            last = torch.where(finished, last, sample(logits, **sampling))
            yield last
            for token in stop:
                finished |= last == token
            if finished.all():
                return
            tokens = last.unsqueeze(1)

    def generate(self, prompt: Tensor, max_new_tokens: int, **options) -> Tensor:
        """Return the prompt (B, L) and its continuation; options as in `stream`."""
        new = [token.unsqueeze(1) for token in self.stream(prompt, max_new_tokens, **options)]
        return torch.cat((prompt, *new), dim=1)


def refuse_other_parameters(attention: Attention, layer: Layer) -> None:
    """Refuse settings whose parameters a trained layer does not have."""
    old = attention.mechanism
    new = layer.attention
    gated = attention.forget is not None
    if new.parameter_init != old.parameter_init or gated != (layer.positions == "fox"):
        raise UserError(
            f"a model trained with {old.name!r}, positions {attention.positions!r} lacks the "
            f"parameters of {new.name!r}, positions {layer.positions!r}"
        )


def sample(logits: Tensor, temperature=1.0, top_k=None, top_p=None, generator=None) -> Tensor:
    """Draw one token per row of logits (B, V).

    `top_k` keeps the most likely tokens, `top_p` the fewest whose probabilities reach it.
    Temperature 0 takes the most likely one.
    """
    if not 0 <= temperature < math.inf:
        raise UserError(f"temperature = {temperature} must be 0 (greedy) or more")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k = {top_k} must be at least 1; leave it out to keep all tokens")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"top_p = {top_p} must be in (0, 1]; leave it out to keep all tokens")
    if not logits.isfinite().all():
        raise UserError("the model's logits are not finite: there is no token to choose from them")
    if temperature < 1e-6:  # logits would overflow, and it is the argmax anyway
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None:
        smallest = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if top_p is not None:
        ordered, index = logits.sort(descending=True)
        probability = ordered.softmax(-1)
        # Keep the smallest set that reaches top_p: drop tokens that come after it was reached.
        outside = probability.cumsum(-1) - probability >= top_p
        outside[:, 0] = False  # a top_p that rounds to zero in the logits' type would drop all
        logits = logits.masked_fill(outside.scatter(-1, index, outside), -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
