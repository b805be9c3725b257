"""python attention_maps.py CKPT [CKPT ...] --text "..." --out results/maps.json

Shows the attention weights of every head of one layer (the last, or `--layer`), as one figure per
checkpoint and as numbers. Without `--text`, it reads the sentence of the paper's figure. Colours
end at 0.5.

Per head, over rows i > 3, as the first rows see few keys:

    sink         mean weight on the first token
    entropy      mean of -sum w log w in nats, with |w| scaled to sum to one
    zeros        share of the weights in view, within the layer's window, that are exactly zero
    top_weight   mean of the largest weight
    top_cosine   mean cosine between the query and the key that has it
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data.tokeniser import Tokeniser
from evaluating.arguments import EvaluationParser
from evaluating.checkpoints import Checkpoint, labels, layer_inputs, open_checkpoints
from evaluating.protocol import open_results
from evaluating.results import Record
from lssar.errors import UserError
from lssar.reference import UNSHIFTED_ROWS, attention_weights
from lssar.spans import shifted_keys
from model import GPT
from support import plots
from support.command import positive, run
from support.text import table
from training import distributed

# The sentence of the paper's figure.
CAPTION_TEXT = (
    "Working from home can be great most days. I enjoy the flexibility and not having to commute "
    "in traffic. But sometimes I miss the office interactions with my coworkers and team meetings."
)
CLAMP = 0.5  # weights above it have the darkest colour
COLUMNS = 4  # panels in a row
PANEL = 2.3  # inches
SMALLEST_TYPE = 3.5  # points; a vector figure is still legible enlarged


def make_parser() -> EvaluationParser:
    parser = EvaluationParser(__doc__, precision=False)
    parser.add_argument("--text", default=CAPTION_TEXT)
    parser.add_argument("--layer", type=positive, help="from 1; default the last")
    return parser


@torch.inference_mode()
def layer_weights(model: GPT, tokens: Tensor, layer: int) -> tuple[Tensor, Tensor, int | None]:
    """Return attention matrices and cosines (heads, L, L) of `layer`, and its window if any."""
    attention, x, rope, first = layer_inputs(model, tokens.unsqueeze(0), layer)
    q, k, _ = attention.queries_keys_values(x, rope)
    gates = () if attention.forget is None else (attention.gates(x),)
    decay = attention.decay(k, *gates)
    k = shifted_keys(k, first) if attention.shift else k
    cosines = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
    weights = attention_weights(
        q, k, attention.mechanism, first=first, head_scale=attention.head_scale, decay=decay
    )
    return weights[0].cpu(), cosines[0].cpu(), attention.mechanism.window


def visible_keys(length: int, window: int | None) -> Tensor:
    """Return which keys each query sees, (L, L): those up to it, within the layer's window."""
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    return visible.triu(1 - window) if window else visible


def head_statistics(weights: Tensor, cosines: Tensor, visible: Tensor) -> dict[str, list[float]]:
    """Return one number per head; weights and cosines (heads, L, L), visible (L, L)."""
    rows = weights[:, UNSHIFTED_ROWS:].double()  # (heads, L - 3, L)
    visible = visible[UNSHIFTED_ROWS:]
    share = rows.abs() / rows.abs().sum(-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    entropy = -torch.special.xlogy(share, share).sum(-1).mean(-1)
    zeros = ((rows == 0) & visible).sum((-1, -2)) / visible.sum()
    top, key = rows.max(-1)  # (heads, L - 3)
    cosine = cosines[:, UNSHIFTED_ROWS:].gather(-1, key.unsqueeze(-1)).squeeze(-1)
    return {
        "sink": rows[:, :, 0].mean(-1).tolist(),
        "entropy": entropy.tolist(),
        "zeros": zeros.tolist(),
        "top_weight": top.mean(-1).tolist(),
        "top_cosine": cosine.mean(-1).tolist(),
    }


def heads_table(statistics: dict[str, list[float]]) -> str:
    """Return a table of one row per head and one of their means."""
    heads = zip(*statistics.values(), strict=True)
    rows = [[str(n), *(f"{v:.3f}" for v in head)] for n, head in enumerate(heads, start=1)]
    rows.append(["mean", *(f"{np.mean(values):.3f}" for values in statistics.values())])
    return table(["head", *statistics], rows)


def token_names(tokeniser: Tokeniser, tokens: list[int]) -> list[str]:
    """Return each token as visible text: a space as an open box, a newline as an arrow."""
    shown = str.maketrans({" ": "\u2423", "\n": "\u21b5", "\t": "\u21e5"})
    texts = [tokeniser.decode([token]).translate(shown) for token in tokens]
    return ["".join(c if c.isprintable() else f"<{ord(c):x}>" for c in text) for text in texts]


def draw(weights: Tensor, sinks: list[float], names: list[str], title: str):
    """Draw one panel per head; weights (heads, L, L), and the tokens' names along the axes."""
    heads = len(weights)
    columns = min(COLUMNS, heads)
    rows = -(-heads // columns)
    width = PANEL * columns + 0.9
    height = (PANEL + 0.2) * rows + 0.5
    figure, grid = plots.figure(
        rows, columns, width, height, squeeze=False, sharex=True, sharey=True
    )
    type_size = min(7.0, 0.8 * PANEL * 72 / len(names))
    panels = zip(grid.flat, weights.numpy(), sinks, strict=False)
    for head, (axes, matrix, sink) in enumerate(panels, start=1):
        image = plots.heatmap(axes, np.clip(matrix, 0, CLAMP), low=0, high=CLAMP)
        axes.set_box_aspect(1)
        axes.set_title(f"head {head}: sink {sink:.2f}", fontsize=7)
        if type_size >= SMALLEST_TYPE:
            axes.set_xticks(range(len(names)), names, rotation=90, fontsize=type_size)
            axes.set_yticks(range(len(names)), names, fontsize=type_size)
            axes.tick_params(length=0, pad=1)
    for axes in grid.flat[heads:]:
        axes.set_visible(False)
    figure.suptitle(title, fontsize=8)
    figure.supxlabel("key", fontsize=8)
    figure.supylabel("query", fontsize=8)
    bar = figure.colorbar(image, ax=grid, fraction=0.04, pad=0.02, aspect=30)
    bar.set_label(f"attention weight, clamped to [0, {CLAMP}]")
    return figure


def main(argv: list[str]) -> None:
    arguments = make_parser().parse_args(argv)
    device = distributed.start(arguments.device).device
    checkpoints = open_checkpoints(arguments.checkpoints)
    inputs = [tokens_and_layer(checkpoint, arguments) for checkpoint in checkpoints]
    settings = {"text": arguments.text, "layer": arguments.layer}
    results = open_results(arguments.out, "attention maps", settings, about={"clamp": CLAMP})
    for checkpoint in checkpoints:
        results.runs.setdefault(checkpoint.identity, checkpoint.describe())
    names = labels(results.runs)
    for checkpoint, (tokens, layer) in zip(checkpoints, inputs, strict=True):
        identity = checkpoint.identity
        name = names[identity]
        batch = torch.from_numpy(tokens.astype(np.int64)).to(device)
        weights, cosines, window = layer_weights(checkpoint.load(device), batch, layer - 1)
        statistics = head_statistics(weights, cosines, visible_keys(len(tokens), window))
        if results.find(run=identity) is None:
            records = []
            for quantity, heads in statistics.items():
                details = {"layer": layer, "heads": heads}
                mean = float(np.mean(heads))
                records.append(
                    Record(quantity, identity, mean, length=len(tokens), details=details)
                )
            results.add(*records)
        title = f"{name}, layer {layer}"
        print(f"\n{title}\n{heads_table(statistics)}")
        shown = token_names(checkpoint.tokeniser(), tokens)
        file = "".join(c if c.isalnum() or c in ".-" else "_" for c in name)
        figure = draw(weights, statistics["sink"], shown, title)
        plots.publish(figure, results.sibling(f"-{file}.png"))


def tokens_and_layer(checkpoint: Checkpoint, arguments) -> tuple[np.ndarray, int]:
    """Return the tokens of the text and the number of the layer, from 1; by default the last."""
    tokens = checkpoint.tokeniser().encode(arguments.text)
    layers = checkpoint.config.layers
    if len(tokens) <= UNSHIFTED_ROWS:
        raise UserError(
            f"--text {arguments.text!r} has {len(tokens)} tokens for {checkpoint.path}; "
            f"at least {UNSHIFTED_ROWS + 1} are needed"
        )
    layer = arguments.layer or layers
    if layer > layers:
        raise UserError(f"--layer {layer}: {checkpoint.path} has layers 1 to {layers}")
    return tokens, layer


if __name__ == "__main__":
    run(main)
