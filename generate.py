"""python generate.py CKPT --prompt "Once upon a time"

Prints text that a checkpoint generates, as it is made.

    --tokens 200                            new tokens at most; it stops at the end of a document
    --temperature 0.8 --top-k 50 --top-p 0.95
    --greedy                                always the most likely token
    --seed 0                                the same seed gives the same text
"""

import codecs
from collections.abc import Iterable, Iterator
from itertools import takewhile

import numpy as np
import torch

from data.tokeniser import Tokeniser
from evaluating.arguments import EvaluationParser
from evaluating.checkpoints import open_checkpoints
from support.command import number, positive, run, seed_number, whole
from training import distributed


def make_parser() -> EvaluationParser:
    parser = EvaluationParser(__doc__, many=False, precision=False)
    parser.add_argument("checkpoint", metavar="CKPT", help="run or checkpoint")
    parser.add_argument("--prompt", default="", help="default: the beginning of a document")
    parser.add_argument("--tokens", type=whole(1, 10**6), default=200)
    parser.add_argument("--temperature", type=number(), default=0.8, help="or --greedy")
    parser.add_argument("--top-k", type=positive)
    parser.add_argument("--top-p", type=number(most=1))
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--seed", type=seed_number, default=0)
    return parser


def text_pieces(tokeniser: Tokeniser, tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of a stream of tokens in pieces, never cut inside a character."""
    return codecs.iterdecode(map(tokeniser.spell, tokens), "utf-8", errors="replace")


def main(argv: list[str]) -> None:
    arguments = make_parser().parse_args(argv)
    (checkpoint,) = open_checkpoints([arguments.checkpoint])
    tokeniser = checkpoint.tokeniser()
    # A document begins after the end of another: that is also the prompt when there is none.
    prompt = np.append(np.uint16(tokeniser.eot), tokeniser.encode(arguments.prompt))
    device = distributed.start(arguments.device).device
    batch = torch.from_numpy(prompt.astype(np.int64)).unsqueeze(0).to(device)
    stream = checkpoint.load(device).stream(
        batch,
        arguments.tokens,
        stop=(tokeniser.eot,),
        temperature=0.0 if arguments.greedy else arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        generator=torch.Generator(device).manual_seed(arguments.seed),
    )
    tokens = takewhile(lambda token: token != tokeniser.eot, map(int, stream))
    print(arguments.prompt, end="")
    for piece in text_pieces(tokeniser, tokens):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    run(main)
