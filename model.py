"""GPT-2 with any attention mechanism of the paper, and layers of one kind or two.

Pre-LN blocks, tied embeddings, biases, GPT-2's initialisation. The model works at any length: RoPE
is computed on demand, and the row count N of the mechanisms follows the absolute position, with
and without a KV cache.

All layers see everything before them, unless a `pattern` such as ("local:32", "global") makes some
of them local: these see the last 32 tokens, with a mechanism and positions of their own. With
`shift`, a global layer keeps each value under the previous token's key, and so finds what followed
similar tokens.

Three settings adapt input and output to data other than text (physics/): `channels` tokens per
position, a learned table of `positions`, a regression head with `outputs` numbers.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from attention import POSITIONS, Attention, KVCache, Rope, rope_at
from lssar.errors import UserError, did_you_mean
from lssar.mechanisms import MECHANISMS, OVERRIDES, Mechanism, get_mechanism
from lssar.spans import document_starts, token_positions
from training.losses import labelled_mse, linear_cross_entropy, token_losses

# What the weights mean: raised by every change after which the same weights compute something
# else. Checkpoints and exports carry it, and those of another meaning are refused.
#   1, or none: RoPE turns dimension i together with i + d/2
#   2: RoPE turns dimensions 2i and 2i + 1
MEANING = 2
MOST_LAYERS = 1000  # a mistyped number should not build modules for an hour


def require(holds: object, rule: str) -> None:
    if not holds:
        raise UserError(f"model: {rule}")


class Layer(NamedTuple):  # what layers can differ in
    attention: Mechanism
    positions: str | int


@dataclass(frozen=True)
class ModelConfig:
    layers: int
    heads: int
    width: int
    vocab_size: int
    vocab_rows: int  # of the embedding table: vocab_size, or padded to a multiple of 64 for speed
    attention: Mechanism
    interpolation: float = 1.0  # position interpolation: RoPE position m becomes m / interpolation
    scaling: str = "pi"  # or "ntk", "yarn": how RoPE is stretched by `interpolation`
    channels: int = 1  # tokens per position; above 1: a table for each, and an untied head
    positions: str | int = "rope"  # one of POSITIONS, or the rows of a learned table
    pattern: tuple[str, ...] = ("global",)  # repeated over the layers: "global", or "local:WINDOW"
    local: Layer | None = None  # of the local layers; None: `attention` and `positions`
    outputs: int = 0  # numbers per position from a regression head; 0: a token
    shift: bool = False  # global layers keep a value under the previous token's key
    documents: bool = False  # a row sees its own document only, from its end-of-text token on

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def end_of_text(self) -> int:
        return self.vocab_size - 1  # the last token of both our tokenisers

    def layer(self, number: int) -> Layer:
        """Of the layers from 0; no window is wider than the one of `attention`."""
        plain = Layer(self.attention, self.positions)
        kind, _, window = self.pattern[number % len(self.pattern)].partition(":")
        if kind == "global":
            return plain
        attention, positions = self.local or plain
        narrower = min(int(window), self.attention.window or int(window))
        return Layer(replace(attention, window=narrower, sinks=0), positions)

    def shifts(self, number: int) -> bool:
        """Whether a layer has shifted keys."""
        return self.shift and self.pattern[number % len(self.pattern)] == "global"

    @property
    def all_layers(self) -> list[Layer]:
        return [self.layer(number) for number in range(self.layers)]

    def __post_init__(self):
        object.__setattr__(self, "pattern", tuple(self.pattern))  # TOML and JSON have lists
        for key in ("layers", "heads", "width", "vocab_size", "vocab_rows", "channels", "outputs"):
            value, least = getattr(self, key), 0 if key == "outputs" else 1
            require(type(value) is int, f"{key} = {value!r} is of a wrong type, must be int")
            require(value >= least, f"{key} = {value} must be at least {least}")
        require(self.layers <= MOST_LAYERS, f"layers = {self.layers} must be at most {MOST_LAYERS}")
        even = f"width = {self.width} must be an even multiple of heads = {self.heads}"
        require(self.width % (2 * self.heads) == 0, f"{even} (RoPE turns pairs of dimensions)")
        masked = self.documents is True and self.channels == 1 and not self.outputs
        rule = "data.document_mask is true or false, and for text"
        require(masked or self.documents is False, f"documents = {self.documents!r}; {rule}")
        rows, vocab, stretch = self.vocab_rows, self.vocab_size, self.interpolation
        require(rows >= vocab, f"vocab_rows = {rows} must be at least vocab_size = {vocab}")
        require(0 < stretch < math.inf, f"interpolation = {stretch} must be positive")
        require(type(self.shift) is bool, f"shift = {self.shift!r} must be true or false")
        sinks = f"shifted keys and sinks = {self.attention.sinks} do not go together"
        require(not (self.shift and self.attention.sinks), f"{sinks}; leave one out")
        require(self.scaling in ("pi", "ntk", "yarn"), f"scaling = {self.scaling!r} is unknown")
        self._check_layers()

    def _check_layers(self) -> None:
        pattern, place, stretch = self.pattern, self.positions, self.interpolation
        for entry in pattern:
            known = re.fullmatch(r"global|local:[1-9][0-9]{0,11}", str(entry))
            require(known, f"pattern has {entry!r:.50}; write 'global', or 'local:32' for a window")
        fits = f"pattern = {list(pattern)} must have 1 to layers = {self.layers} entries"
        require(1 <= len(pattern) <= self.layers, fits)
        table = type(place) is int and place >= 1
        known = f"choose from {', '.join(POSITIONS)}, or the rows of a learned table"
        require(table or place in POSITIONS, f"positions = {place!r}; {known}")
        if self.local is not None:
            local, own = self.local.positions, set(pattern) != {"global"}
            require(own, f"[local] is for local layers, and pattern = {list(pattern)} has none")
            suits = local == place if table else local in POSITIONS
            require(suits, f"positions = {local!r} of local layers do not go with {place!r}")
        rotary = any(layer.positions == "rope" for layer in self.all_layers)
        none = f"interpolation = {stretch} stretches RoPE, positions = {place} replaces it"
        require(rotary or stretch == 1, f"{none}; leave one out")

    def to_dict(self) -> dict:
        """Plain JSON values; attention by its name and its changed settings."""
        # Without defaults: the identity of a model has no key that is newer than the model.
        new = {f.name: f.default for f in fields(self) if f.name != "interpolation"}
        plain = {k: v for k, v in vars(self).items() if v != new.get(k)}
        plain["attention"] = _changes(self.attention)
        if self.local is not None:
            plain["local"] = self.local._asdict() | {"attention": _changes(self.local.attention)}
        return plain | ({"pattern": list(self.pattern)} if "pattern" in plain else {})

    @classmethod
    def from_dict(cls, values: dict) -> "ModelConfig":
        try:
            found = values | {"attention": get_mechanism(**values["attention"])}
            if local := values.get("local"):
                mechanism = get_mechanism(**local["attention"])
                found["local"] = Layer(**(local | {"attention": mechanism}))
            return cls(**found)
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"model config: missing, unknown or mistyped key: {error}") from None


def _changes(m: Mechanism) -> dict:
    """The arguments of `get_mechanism` that make it."""
    entry = MECHANISMS[m.name]
    changed = {k: getattr(m, k) for k in OVERRIDES if getattr(m, k) != getattr(entry, k)}
    return {"name": m.name, **changed}


BYTES, GPT2 = {"vocab_size": 257, "vocab_rows": 257}, {"vocab_size": 50257, "vocab_rows": 50304}
VOCABULARIES = {"bytes": BYTES, "gpt2": GPT2}
PRESETS: dict[str, dict[str, int]] = {
    "nano": {"layers": 3, "heads": 3, "width": 96, **BYTES},
    "45m": {"layers": 6, "heads": 8, "width": 512, **GPT2},
    "124m": {"layers": 12, "heads": 12, "width": 768, **GPT2},
    "355m": {"layers": 24, "heads": 16, "width": 1024, **GPT2},
}


def preset(name: str, attention="softmax", tokeniser: str | None = None, **changes) -> ModelConfig:
    """A model of the paper by its size, with a mechanism or the name of one, perhaps for another
    tokeniser's vocabulary; `changes` are other values for ModelConfig's fields."""
    if name not in PRESETS:
        raise UserError(f"unknown model preset {name!r}; {did_you_mean(name, PRESETS)}")
    sizes = PRESETS[name]
    if tokeniser is not None:
        guess = did_you_mean(tokeniser, VOCABULARIES)
        require(tokeniser in VOCABULARIES, f"unknown tokeniser {tokeniser!r}; {guess}")
        sizes = sizes | VOCABULARIES[tokeniser]
        ids, size = sizes["vocab_size"], changes.get("vocab_size")
        other = f"vocab_size = {size} contradicts it; leave one out"
        require(size in (None, ids), f"tokeniser = {tokeniser!r} has {ids} ids, {other}")
    mechanism = get_mechanism(attention) if isinstance(attention, str) else attention
    return ModelConfig(**(sizes | changes), attention=mechanism)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config, layer)
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
        table = config.positions if type(config.positions) is int else 0
        self.positions = nn.Embedding(table, width) if table else None
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
        return torch.stack(self._losses(linear_cross_entropy, hidden, targets)).mean()

    def hidden(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Final hidden states (B, L, width); with a cache, of the tokens that follow it."""
        start, length = 0 if cache is None else cache.length, tokens.shape[1]
        x = self._embed(tokens, start)
        place = torch.arange(start, start + length, device=x.device)
        if cache is not None and cache.mask is not None:
            place = token_positions(cache.mask, length)
        first = None
        if self.config.documents:
            starts = tokens == self.config.end_of_text
            first = document_starts(starts) if cache is None else cache.document_starts(starts)
        rope = self.rope(place)
        for block in self.blocks:
            x = block(x, rope, cache, first)
        if cache is not None:
            cache.length += length
        return self.norm(x)

    def rope(self, place: Tensor) -> Rope | None:
        """Of the tokens' places (L,) or (B, L), for the layers that have it."""
        c, m = self.config, self.config.attention
        if not any(block.attention.positions == "rope" for block in self.blocks):
            return None
        stretch = (c.head_dim, c.interpolation, c.scaling, m.train_length)
        rope = rope_at(place, *stretch)
        if m.sinks:  # which stand right before the window
            rope += rope_at((m.window + m.sinks - 1 - place).clamp(max=0), *stretch)
        return rope

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

    def _losses(self, loss: Callable, hidden: Tensor, targets: Tensor) -> list[Tensor]:
        """`loss(hidden, the head's weight, targets, classes)` of each channel."""
        classes, rows = self.config.vocab_size, self.config.vocab_rows
        if self.head is None:
            return [loss(hidden, self.embedding.weight, targets, classes)]
        # The bias becomes the weight of an input of ones; seven zeros keep the rows aligned.
        hidden = F.pad(F.pad(hidden, (0, 1), value=1.0), (0, 7))
        weight = F.pad(torch.cat((self.head.weight, self.head.bias.unsqueeze(1)), dim=1), (0, 7))
        return [loss(hidden, w, targets[..., i], classes) for i, w in enumerate(weight.split(rows))]

    @torch.no_grad()
    def token_losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss of every token, in the shape of the targets, without gradients."""
        losses = self._losses(token_losses, self.hidden(tokens), targets)
        return losses[0] if self.head is None else torch.stack(losses, dim=-1)

    def configure(self, **changes) -> "GPT":
        """The same weights under other fields of the config: `interpolation`, `attention`, ..."""
        config = replace(self.config, **changes)
        for block, (new, place) in zip(self.blocks, config.all_layers, strict=True):
            old, gated = block.attention.mechanism, block.attention.forget is not None
            if new.parameter_init != old.parameter_init or gated != (place == "fox"):
                has = f"{old.name!r}, positions {block.attention.positions!r}"
                lacks = f"lacks the parameters of {new.name!r}, positions {place!r}"
                raise UserError(f"a model trained with {has} {lacks}")
        self.config = config
        for block in self.blocks:
            block.attention.configure(config)
        return self

    def use_backend(self, name: str) -> "GPT":
        """Compute attention with one of `lssar.BACKENDS`, or "auto"."""
        for block in self.blocks:
            block.attention.backend = name
        return self

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, length: int) -> float:
        """Of a training step: 6 per weight of a product, and what attention sees: the causal half,
        or less through a window."""
        lookups = [self.positions, self.head and self.embedding]  # tables that multiply nothing
        dense = sum(p.numel() for p in self.parameters() if p.dim() >= 2)
        dense -= sum(table.weight.numel() for table in lookups if table is not None)
        windows = [min(m.window or length, length) for m, _ in self.config.all_layers]
        seen = sum(w * (1 - w / max(2 * length, 1)) for w in windows)  # keys per token
        return 6 * dense + 12 * self.config.width * seen

    def parameter_groups(self, weight_decay: float) -> list[dict]:
        """For the optimiser: decay on matrices only, not on biases, norms or head scales."""
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]
        decayed = {"params": matrices, "weight_decay": weight_decay}
        return [decayed, {"params": others, "weight_decay": 0.0}]

    @torch.inference_mode()
    def stream(self, prompt: Tensor, max_new_tokens: int, stop=(), **sampling) -> Iterator[Tensor]:
        """Yield the next token of each sequence (B,), one step at a time, through a KV cache.

        `sampling`: the options of `sample`. A sequence repeats its stop token once it has produced
        one of them; the stream ends when all have, or after max_new_tokens.
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


def sample(logits: Tensor, temperature=1.0, top_k=None, top_p=None, generator=None) -> Tensor:
    """One token per row of logits (B, V): of all, of the `top_k` most likely, or of the fewest
    whose probabilities reach `top_p`; temperature 0 is the argmax."""
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
