"""python generate.py CKPT --prompt "Once upon a time"

Text from any checkpoint, printed as it is made.

    --tokens 200                            new tokens at most; it stops at the end of a document
    --temperature 0.8 --top-k 50 --top-p 0.95
    --greedy                                always the most likely token
    --seed 0                                the same seed, the same text
"""

import sys
from collections.abc import Iterable, Iterator

import numpy as np
import torch

import distributed
from data.tokeniser import REPLACEMENT, Tokeniser
from errors import UserError, run
from evaluation import EvaluationParser, open_checkpoints
from model import GPT

# A character has at most four bytes and a token at least one, so what is still missing its end
# began at most three tokens ago.
LONGEST_UNFINISHED = 3


def text_pieces(tokeniser: Tokeniser, tokens: Iterable[int]) -> Iterator[str]:
    """The text of a stream of tokens, piece by piece, never cut inside a character.

    The pieces joined are exactly `tokeniser.decode` of all tokens.
    """
    pending: list[int] = []
    for token in tokens:
        pending.append(token)
        text = tokeniser.decode(pending)
        cut = len(pending)
        if text.endswith(REPLACEMENT):  # perhaps the beginning of a character
            cut = max(0, len(pending) - LONGEST_UNFINISHED)
        ready = tokeniser.decode(pending[:cut])
        if cut and ready + tokeniser.decode(pending[cut:]) == text:
            yield ready
            pending = pending[cut:]
    if pending:
        yield tokeniser.decode(pending)


def new_tokens(model: GPT, prompt: np.ndarray, eot: int, arguments, device) -> Iterator[int]:
    batch = torch.from_numpy(prompt.astype(np.int64)).unsqueeze(0).to(device)
    stream = model.stream(
        batch,
        arguments.tokens,
        temperature=0.0 if arguments.greedy else arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        stop=(eot,),
        generator=torch.Generator(device).manual_seed(arguments.seed),
    )
    for step in stream:
        if (token := int(step)) == eot:
            return
        yield token


def main(argv: list[str]) -> None:
    arguments = make_parser().parse_args(argv)
    check(arguments)
    (checkpoint,) = open_checkpoints([arguments.checkpoint])
    tokeniser = checkpoint.tokeniser()
    # A document begins after the end of another: that is also the prompt when there is none.
    prompt = np.append(np.uint16(tokeniser.eot), tokeniser.encode(arguments.prompt))
    device = distributed.start(arguments.device).device
    model = checkpoint.load(device)
    sys.stdout.write(arguments.prompt)
    for piece in text_pieces(
        tokeniser, new_tokens(model, prompt, tokeniser.eot, arguments, device)
    ):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def make_parser() -> EvaluationParser:
    parser = EvaluationParser(__doc__)
    parser.add_argument("checkpoint", metavar="CKPT", help="run or checkpoint")
    parser.add_argument("--prompt", default="", help="default: the beginning of a document")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def check(arguments) -> None:
    def require(holds: bool, option: str, rule: str) -> None:
        if not holds:
            value = getattr(arguments, option.replace("-", "_"))
            raise UserError(f"--{option} {value}: {rule}")

    require(arguments.tokens >= 1, "tokens", "must be at least 1")
    require(0 < arguments.temperature < float("inf"), "temperature", "must be above 0; or --greedy")
    require(arguments.top_k is None or arguments.top_k >= 1, "top-k", "must be at least 1")
    require(arguments.top_p is None or 0 < arguments.top_p <= 1, "top-p", "must be in (0, 1]")


if __name__ == "__main__":
    run(main)
