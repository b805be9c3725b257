"""GPT-2 with rotary positions and any attention mechanism of the paper.

Pre-LN blocks, tied embeddings, biases, GPT-2's initialisation. The model works at any length: RoPE
is computed on demand, and the row count N of the mechanisms follows the absolute position, with
and without a KV cache.

Three settings adapt input and output to data other than text (physics/): `channels` tokens per
position, a learned table of `positions`, a regression head with `outputs` numbers.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from attention import Attention, KVCache, Rope, rope_at
from lssar.errors import UserError, did_you_mean
from lssar.mechanisms import MECHANISMS, OVERRIDES, Mechanism, get_mechanism
from lssar.spans import document_starts, token_positions
from training.cross_entropy import linear_cross_entropy, token_losses

# What the weights mean: raised by every change after which the same weights compute something
# else. Checkpoints and exports carry it, and those of another meaning are refused.
#   1, or none: RoPE turns dimension i together with i + d/2
#   2: RoPE turns dimensions 2i and 2i + 1
MEANING = 2
LEAST_TEMPERATURE = 1e-6  # below it logits would overflow, and sampling is the argmax anyway
MOST_LAYERS = 1000  # a mistyped number should not build modules for an hour
TEXT = {"channels": 1, "positions": 0, "outputs": 0}  # a text model's values, and the least


@dataclass(frozen=True)
class ModelConfig:
    layers: int
    heads: int
    width: int
    vocab_size: int
    vocab_rows: int  # of the embedding table: vocab_size, or padded to a multiple of 64 for speed
    attention: Mechanism
    interpolation: float = 1.0  # position interpolation: RoPE position m becomes m / interpolation
    channels: int = 1  # tokens per position; above 1: a table for each, and an untied head
    positions: int = 0  # rows of a learned position table in place of RoPE; 0: RoPE
    outputs: int = 0  # numbers per position from a regression head; 0: a token
    documents: bool = False  # a row sees its own document only, from its end-of-text token on

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def end_of_text(self) -> int:
        return self.vocab_size - 1  # the last token of both our tokenisers

    def __post_init__(self):
        def require(holds: bool, rule: str):
            if not holds:
                raise UserError(f"model: {rule}")

        many = self.channels != 1
        least = dict.fromkeys(("layers", "heads", "width", "vocab_size", "vocab_rows"), 1) | TEXT
        for key, lowest in least.items():
            value = getattr(self, key)
            require(type(value) is int, f"{key} = {value!r} is of a wrong type, must be int")
            require(value >= lowest, f"{key} = {value} must be at least {lowest}")
        require(self.layers <= MOST_LAYERS, f"layers = {self.layers} must be at most {MOST_LAYERS}")
        even = f"width = {self.width} must be an even multiple of heads = {self.heads}"
        require(self.width % (2 * self.heads) == 0, f"{even} (RoPE turns pairs of dimensions)")
        require(
            self.documents is False or (self.documents is True and not (many or self.outputs)),
            f"documents = {self.documents!r}; data.document_mask is true or false, and for text",
        )
        rows, vocab, stretch = self.vocab_rows, self.vocab_size, self.interpolation
        require(rows >= vocab, f"vocab_rows = {rows} must be at least vocab_size = {vocab}")
        require(0 < stretch < math.inf, f"interpolation = {stretch} must be positive")
        both = f"interpolation = {stretch} stretches RoPE, positions = {self.positions} replaces it"
        require(not self.positions or stretch == 1, f"{both}; leave one out")

    def to_dict(self) -> dict:
        """Plain JSON values; the attention by its name and its changed settings."""
        entry = MECHANISMS[self.attention.name]
        settings = {key: getattr(self.attention, key) for key in OVERRIDES}
        changed = {k: v for k, v in settings.items() if v != getattr(entry, k)}
        # A plain text model's description, and so its identity, has none of these keys.
        absent = TEXT | {"documents": False}
        plain = {k: v for k, v in asdict(self).items() if v != absent.get(k)}
        return plain | {"attention": {"name": entry.name, **changed}}

    @classmethod
    def from_dict(cls, values: dict) -> "ModelConfig":
        try:
            return cls(**(values | {"attention": get_mechanism(**values["attention"])}))
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"model config: missing, unknown or mistyped key: {error}") from None


BYTES, GPT2 = {"vocab_size": 257, "vocab_rows": 257}, {"vocab_size": 50257, "vocab_rows": 50304}
VOCABULARIES = {"bytes": BYTES, "gpt2": GPT2}
PRESETS: dict[str, dict[str, int]] = {
    "nano": {"layers": 3, "heads": 3, "width": 96, **BYTES},
    "45m": {"layers": 6, "heads": 8, "width": 512, **GPT2},
    "124m": {"layers": 12, "heads": 12, "width": 768, **GPT2},
    "355m": {"layers": 24, "heads": 16, "width": 1024, **GPT2},
}


def preset(
    name: str, attention: str | Mechanism = "softmax", tokeniser: str | None = None, **changes
) -> ModelConfig:
    """A model of the paper by its size, perhaps for another tokeniser's vocabulary; `changes` are
    other values for ModelConfig's fields."""
    if name not in PRESETS:
        raise UserError(f"unknown model preset {name!r}; {did_you_mean(name, PRESETS)}")
    if tokeniser not in (None, *VOCABULARIES):
        guess = did_you_mean(tokeniser, VOCABULARIES)
        raise UserError(f"model: unknown tokeniser {tokeniser!r}; {guess}")
    vocabulary = VOCABULARIES.get(tokeniser, {})
    size = changes.get("vocab_size")
    if vocabulary and size not in (None, vocabulary["vocab_size"]):
        has = f"tokeniser = {tokeniser!r} has {vocabulary['vocab_size']} ids"
        raise UserError(f"model: {has}, vocab_size = {size} contradicts it; leave one out")
    mechanism = get_mechanism(attention) if isinstance(attention, str) else attention
    return ModelConfig(**(PRESETS[name] | vocabulary | changes), attention=mechanism)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config.width, config.heads, config.attention, layer)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.mlp_in = nn.Linear(config.width, 4 * config.width)
        self.mlp_out = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor, rope: Rope | None, cache: KVCache | None, first=None) -> Tensor:
        x = x + self.attention(self.norm_attention(x), rope, cache, first)
        return x + self.mlp_out(F.gelu(self.mlp_in(self.norm_mlp(x))))


class GPT(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        channels, width = config.channels, config.width
        self.embedding = nn.Embedding(channels * config.vocab_rows, width)  # of all channels
        self.join = nn.Linear(channels * width, width) if channels > 1 else None
        self.positions = nn.Embedding(config.positions, width) if config.positions else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = nn.LayerNorm(width)
        outputs = config.outputs or (channels * config.vocab_rows if channels > 1 else 0)
        self.head = nn.Linear(width, outputs) if outputs else None  # None: tied to the embedding
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        """GPT-2's: N(0, 0.02), divided by sqrt(2 layers) where a block adds to the residual."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
        if isinstance(module, Block):
            for projection in (module.attention.proj, module.mlp_out):
                nn.init.normal_(projection.weight, std=0.02 / math.sqrt(2 * self.config.layers))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """The mean loss with targets, else the logits (B, L, vocab_size) of every position.

        With channels, tokens and targets are (B, L, channels); with outputs, targets are numbers
        (B, L, outputs), NaN where there is no label, and the loss is the mean squared error.
        """
        hidden = self.hidden(tokens)
        if targets is None:
            return self.logits(hidden)
        if self.config.outputs:
            return labelled_mse(self.logits(hidden), targets)
        parts = self._channels(hidden, targets)
        losses = [linear_cross_entropy(*part, self.config.vocab_size) for part in parts]
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def hidden(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Final hidden states (B, L, width); with a cache, of the tokens that follow it."""
        start, length = 0 if cache is None else cache.length, tokens.shape[1]
        x, rope = self._embed(tokens, start), None
        if self.positions is None:
            if cache is None or cache.mask is None:
                place = torch.arange(start, start + length, device=x.device)
            else:
                place = token_positions(cache.mask, length)
            rope = rope_at(place, self.config.head_dim, self.config.interpolation)
        first = self._first(tokens, cache) if self.config.documents else None
        for block in self.blocks:
            x = block(x, rope, cache, first)
        if cache is not None:
            cache.length += length
        return self.norm(x)

    def _first(self, tokens: Tensor, cache: KVCache | None) -> Tensor | None:
        """The place where each token's document starts, (B, L)."""
        starts = tokens == self.config.end_of_text
        if cache is None:
            return document_starts(starts)
        if cache.mask is not None:
            if starts[:, cache.length == 0 :].any():
                raise UserError(
                    "a padded batch holds several documents per row; pass them one by one"
                )
            return None
        first = torch.where(starts.cummax(1).values, cache.length + document_starts(starts), 0)
        first = first if cache.document is None else torch.maximum(first, cache.document)
        cache.document = first[:, -1:]
        return first

    def _embed(self, tokens: Tensor, start: int) -> Tensor:
        c, end = self.config, start + tokens.shape[1]
        if self.join is None:
            x = self.embedding(tokens)
        else:  # each channel has its own rows of the table
            first = torch.arange(c.channels, device=tokens.device) * c.vocab_rows
            x = self.join(self.embedding(tokens + first).flatten(2))
        if self.positions is None:
            return x
        if end > c.positions:
            raise UserError(f"{end} is longer than the model's table of {c.positions} positions")
        return x + self.positions.weight[start:end]

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., vocab_size), or (..., channels, vocab_size), or (..., outputs)."""
        c = self.config
        if self.head is None:
            return F.linear(hidden, self.embedding.weight)[..., : c.vocab_size].float()
        out = self.head(hidden).float()
        return out if c.outputs else out.unflatten(-1, (c.channels, -1))[..., : c.vocab_size]

    def _channels(self, hidden: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(hidden, the head's weight, targets) of each channel."""
        if self.head is None:
            return [(hidden, self.embedding.weight, targets)]
        # The bias becomes the weight of an input of ones; seven zeros keep the rows aligned.
        hidden = F.pad(F.pad(hidden, (0, 1), value=1.0), (0, 7))
        weight = F.pad(torch.cat((self.head.weight, self.head.bias.unsqueeze(1)), dim=1), (0, 7))
        parts = weight.split(self.config.vocab_rows)
        return [(hidden, part, targets[..., i]) for i, part in enumerate(parts)]

    def token_losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss of every token, in the shape of the targets, without gradients."""
        with torch.no_grad():
            parts = self._channels(self.hidden(tokens), targets)
        losses = [token_losses(*part, self.config.vocab_size) for part in parts]
        return losses[0] if self.head is None else torch.stack(losses, dim=-1)

    def configure(self, **changes) -> "GPT":
        """The same weights under another `interpolation` or `attention` (p, alpha, window, ...)."""
        config = replace(self.config, **changes)
        if config.attention.parameter_init != self.config.attention.parameter_init:
            old, new = self.config.attention.name, config.attention.name
            raise UserError(f"a model trained with {old!r} lacks the parameters of {new!r}")
        self.config = config
        for block in self.blocks:
            block.attention.mechanism = config.attention
        return self

    def use_backend(self, name: str) -> "GPT":
        """Compute attention with one of `lssar.BACKENDS`, or "auto"."""
        for block in self.blocks:
            block.attention.backend = name
        return self

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, length: int) -> float:
        """Of a training step: 6 per weight of a product, and the causal half of the attention."""
        lookups = [self.positions, self.head and self.embedding]  # tables that multiply nothing
        dense = sum(p.numel() for p in self.parameters() if p.dim() >= 2)
        dense -= sum(table.weight.numel() for table in lookups if table is not None)
        return 6 * dense + 6 * self.config.layers * self.config.width * length

    def parameter_groups(self, weight_decay: float) -> list[dict]:
        """For the optimiser: decay on matrices only, not on biases, norms or head scales."""
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]
        decayed = {"params": matrices, "weight_decay": weight_decay}
        return [decayed, {"params": others, "weight_decay": 0.0}]

    @torch.inference_mode()
    def stream(
        self, prompt: Tensor, max_new_tokens: int, *, stop: tuple[int, ...] = (), **sampling
    ) -> Iterator[Tensor]:
        """Yield the next token of each sequence (B,), one step at a time, through a KV cache.

        `sampling`: the options of `sample`. A sequence repeats its stop token once it has produced
        one; the stream ends when all have, or after max_new_tokens.
        """
        cache = KVCache(prompt.shape[1] + max_new_tokens)
        tokens, last = prompt, prompt[:, -1]
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
        """The prompt (B, L) and its continuation; options as in `stream`."""
        new = [token.unsqueeze(1) for token in self.stream(prompt, max_new_tokens, **options)]
        return torch.cat((prompt, *new), dim=1)


def labelled_mse(predicted: Tensor, targets: Tensor) -> Tensor:
    """Mean of (predicted - target)^2 over the targets that are not NaN."""
    labelled = ~targets.isnan()
    error = predicted - torch.where(labelled, targets, predicted.detach())
    return error.square().sum() / labelled.sum().clamp(min=1)


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One token per row of logits (B, V); temperature 0 is the argmax."""
    if not 0 <= temperature < math.inf:
        raise UserError(f"temperature = {temperature} must be 0 (greedy) or more")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k = {top_k} must be at least 1; leave it out to keep all tokens")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"top_p = {top_p} must be in (0, 1]; leave it out to keep all tokens")
    if not logits.isfinite().all():
        raise UserError("the model's logits are not finite, there is no token to choose from them")
    if temperature < LEAST_TEMPERATURE:
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
