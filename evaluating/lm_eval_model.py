"""Wraps a checkpoint for lm-evaluation-harness: loglikelihood, rolling, generate_until.

Requests are sorted by length and batched with padding to the right, which no row ever sees: N
counts a sequence's own tokens only. Longer inputs than `max_length` lose their beginning. Contexts
are given as they are, without an end-of-text token before them, as the harness does by default. An
empty context becomes that token.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from evaluating.checkpoints import Checkpoint
from evaluating.protocol import progress
from lssar.errors import UserError
from model import sample
from modelling.cache import KVCache

NEW_TOKENS = 256  # default of a request; at most half of max_length
GENERATION_SETTINGS = {"do_sample", "temperature", "top_k", "top_p", "until", "max_gen_toks"}

Sequence = tuple[int, ...]  # tokens


class CheckpointLM(TemplateLM):
    def __init__(self, checkpoint: Checkpoint, device, max_length: int, batch_size=16):
        super().__init__()
        self.checkpoint = checkpoint
        self.batch_size = batch_size
        self.max_length = max_length
        self.max_gen_toks = min(NEW_TOKENS, max_length // 2)
        self._device = device
        self._tokeniser = checkpoint.tokeniser()
        self._model = checkpoint.load(device)

    @property
    def eot_token_id(self) -> int:
        """Return the id of the end-of-text token, by which the harness asks for it."""
        return self._tokeniser.eot

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        """Return the tokens of a text."""
        return self._tokeniser.encode(string).tolist()

    def _batches(self, sequences: Iterable[Sequence]) -> Iterator[dict[Sequence, list[int]]]:
        """Yield batches of distinct sequences, the longest first, with the places of each."""
        places = defaultdict(list)
        for place, sequence in enumerate(sequences):
            places[sequence].append(place)
        ordered = sorted(places, key=lambda s: (-len(s), s))
        groups = [ordered]
        layers = self._model.config.all_layers
        if any(layer.attention.length == "current" for layer in layers):
            # L is the width of the batch, so sequences of different lengths cannot share one.
            groups = [list(group) for _, group in groupby(ordered, key=len)]
        for group in groups:
            for first in range(0, len(group), self.batch_size):
                yield {s: places[s] for s in group[first : first + self.batch_size]}

    def _padded(self, sequences: Iterable[Sequence]) -> Tensor:
        """Return sequences as rows (B, longest), padded on the right."""
        rows = [torch.tensor(sequence) for sequence in sequences]
        return pad_sequence(rows, batch_first=True).to(self._device)

    @torch.inference_mode()
    def _loglikelihood_tokens(self, requests: list[tuple], **_) -> list[tuple[float, bool]]:
        """Score requests of (texts, context, continuation), the latter two as tokens."""
        for _, _, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise UserError(
                    f"a continuation of {len(continuation)} tokens cannot be scored; "
                    f"give 1 to max_length = {self.max_length}"
                )
        texts = ((context or [self.prefix_token_id]) + new for _, context, new in requests)
        inputs = [tuple(tokens[-self.max_length - 1 : -1]) for tokens in texts]
        answers: list = [None] * len(requests)
        with progress(len(requests), self.checkpoint.info.run, "request") as bar:
            for batch in self._batches(inputs):
                hidden = self._model.hidden(self._padded(batch))  # (B, longest, width)
                for row, (sequence, places) in zip(hidden, batch.items(), strict=True):
                    for place in places:
                        answers[place] = self._score(row[: len(sequence)], requests[place][2])
                        bar.update()
        return answers

    def _score(self, hidden: Tensor, continuation: list[int]) -> tuple[float, bool]:
        """Return the log-likelihood of a continuation, and whether it is the greedy one."""
        logits = self._model.logits(hidden[-len(continuation) :])
        target = torch.tensor(continuation, device=self._device)
        likely = logits.log_softmax(-1).gather(1, target.unsqueeze(1)).sum().item()
        if not math.isfinite(likely):  # the harness would silently choose among NaNs
            raise UserError(f"{self.checkpoint.path}: the model's logits are not finite")
        return likely, bool((logits.argmax(-1) == target).all())

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, in parts of max_length."""
        windows = []
        owners = []
        for index, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            prefix = self.prefix_token_id
            for window in get_rolling_token_windows(tokens, prefix, self.max_length, 1):
                windows.append((request.args, *make_disjoint_window(window)))
                owners.append(index)
        totals = [0.0] * len(requests)
        for owner, (likely, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += likely
        return totals

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Return the generated text of each request; those with equal settings share batches."""
        groups = defaultdict(list)
        for index, request in enumerate(requests):
            groups[repr(sorted(request.args[1].items()))].append(index)
        answers: list = [None] * len(requests)
        with progress(len(requests), self.checkpoint.info.run, "text") as bar:
            for members in groups.values():
                settings = self._settings(requests[members[0]].args[1])
                room = self.max_length - settings["max_gen_toks"]
                contexts = (self.tok_encode(requests[index].args[0]) for index in members)
                prompts = [tuple((c or [self.prefix_token_id])[-room:]) for c in contexts]
                for batch in self._batches(prompts):
                    texts = self._continue(list(batch), settings)
                    for text, places in zip(texts, batch.values(), strict=True):
                        for place in places:
                            answers[members[place]] = text
                            bar.update()
        return answers

    def _settings(self, given: dict) -> dict:
        """Return the generation settings of a request, or raise for one that is not supported."""
        settings = normalize_gen_kwargs(given, self.max_gen_toks)
        if unknown := set(settings) - GENERATION_SETTINGS:
            known = ", ".join(sorted(GENERATION_SETTINGS))
            raise UserError(f"setting {min(unknown)!r} is not supported; a task may set {known}")
        if settings["max_gen_toks"] >= self.max_length:
            raise UserError(
                f"max_gen_toks {settings['max_gen_toks']} leaves no room for a prompt in "
                f"max_length {self.max_length}"
            )
        return settings

    @torch.inference_mode()
    def _continue(self, prompts: list[Sequence], settings: dict) -> list[str]:
        """Generate after each prompt, up to the first stop string or the end of the document."""
        until = [text for text in settings["until"] if text]
        temperature = settings["temperature"] if settings["do_sample"] else 0
        count = settings["max_gen_toks"]
        tokens = self._padded(prompts)
        rows = torch.arange(len(prompts), device=self._device)
        lengths = torch.tensor([len(p) for p in prompts], device=self._device)
        mask = torch.arange(tokens.shape[1], device=self._device) < lengths.unsqueeze(1)
        cache = KVCache(tokens.shape[1] + count - 1)
        last = lengths - 1
        new: list[list[int]] = [[] for _ in prompts]
        texts = [""] * len(prompts)
        unfinished = set(range(len(prompts)))
        for _ in range(count):
            cache.mask = mask
            logits = self._model.logits(self._model.hidden(tokens, cache)[rows, last])
            chosen = sample(logits, temperature, settings.get("top_k"), settings.get("top_p"))
            for row in sorted(unfinished):
                new[row].append(int(chosen[row]))
                texts[row] = self._tokeniser.decode(t for t in new[row] if t != self.eot_token_id)
                if new[row][-1] == self.eot_token_id or any(stop in texts[row] for stop in until):
                    unfinished.discard(row)
            if not unfinished:
                break
            # Tokens after the end of a text are not used, but its document must not end again.
            tokens = chosen.masked_fill(chosen == self.eot_token_id, 0).unsqueeze(1)
            last = torch.zeros_like(last)
            mask = torch.cat((mask, mask.new_ones(len(prompts), 1)), dim=1)
        return [before_stop(text, until) for text in texts]


def before_stop(text: str, until: list[str]) -> str:
    """Return the text before the first of the stop strings in it."""
    ends = [text.find(stop) for stop in until if stop in text]
    return text[: min(ends)] if ends else text
