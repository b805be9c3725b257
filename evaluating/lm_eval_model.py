"""A checkpoint as a model of lm-evaluation-harness: loglikelihood, rolling, generate_until.

Requests are sorted by length and batched with padding to the right, which no row ever sees: N
counts a sequence's own tokens only. What is longer than `max_length` loses its beginning. Contexts
are given as they are, without an end-of-text token before them, as the harness does by default; an
empty one becomes that token.
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

from attention import KVCache
from evaluating.checkpoints import Checkpoint
from evaluating.protocol import progress
from lssar.errors import UserError
from model import sample

NEW_TOKENS = 256  # default of a request; at most half of max_length
GENERATION_SETTINGS = {"do_sample", "temperature", "top_k", "top_p", "until", "max_gen_toks"}

Sequence = tuple[int, ...]  # tokens


class CheckpointLM(TemplateLM):
    def __init__(self, checkpoint: Checkpoint, device, max_length: int, batch_size=16):
        super().__init__()
        self.checkpoint, self._device, self.batch_size = checkpoint, device, batch_size
        self._tokeniser, self._model = checkpoint.tokeniser(), checkpoint.load(device)
        self.max_length, self.max_gen_toks = max_length, min(NEW_TOKENS, max_length // 2)

    @property
    def eot_token_id(self) -> int:
        return self._tokeniser.eot

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        return self._tokeniser.encode(string).tolist()

    def _batches(self, sequences: Iterable[Sequence]) -> Iterator[dict[Sequence, list[int]]]:
        """Distinct sequences with the places where each occurs, the longest first."""
        places = defaultdict(list)
        for place, sequence in enumerate(sequences):
            places[sequence].append(place)
        ordered = sorted(places, key=lambda s: (-len(s), s))
        layers = self._model.config.all_layers
        alike = any(
            layer.attention.length == "current" for layer in layers
        )  # then L is the width of the batch
        for _, group in groupby(ordered, key=len if alike else lambda s: None):
            group = list(group)
            for first in range(0, len(group), self.batch_size):
                yield {s: places[s] for s in group[first : first + self.batch_size]}

    def _padded(self, sequences: Iterable[Sequence]) -> Tensor:
        rows = [torch.tensor(sequence) for sequence in sequences]
        return pad_sequence(rows, batch_first=True).to(self._device)

    @torch.inference_mode()
    def _loglikelihood_tokens(self, requests: list[tuple], **_) -> list[tuple[float, bool]]:
        """Of (texts, context, continuation), the latter two as tokens."""
        for _, _, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                what = f"a continuation of {len(continuation)} tokens cannot be scored"
                raise UserError(f"{what}; give 1 to max_length = {self.max_length}")
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
        logits = self._model.logits(hidden[-len(continuation) :])
        target = torch.tensor(continuation, device=self._device)
        likely = logits.log_softmax(-1).gather(1, target.unsqueeze(1)).sum().item()
        if not math.isfinite(likely):  # the harness would silently choose among NaNs
            raise UserError(f"{self.checkpoint.path}: the model's logits are not finite")
        return likely, bool((logits.argmax(-1) == target).all())

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        windows, owners = [], []
        for index, request in enumerate(requests):
            tokens, prefix = self.tok_encode(request.args[0]), self.prefix_token_id
            for window in get_rolling_token_windows(tokens, prefix, self.max_length, 1):
                windows.append((request.args, *make_disjoint_window(window)))
                owners.append(index)
        totals = [0.0] * len(requests)
        for owner, (likely, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += likely
        return totals

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
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
        settings = normalize_gen_kwargs(given, self.max_gen_toks)
        if unknown := set(settings) - GENERATION_SETTINGS:
            known = ", ".join(sorted(GENERATION_SETTINGS))
            raise UserError(f"setting {min(unknown)!r} is not supported; a task may set {known}")
        if settings["max_gen_toks"] >= self.max_length:
            new, limit = settings["max_gen_toks"], self.max_length
            raise UserError(f"max_gen_toks {new} leaves no room for a prompt in max_length {limit}")
        return settings

    @torch.inference_mode()
    def _continue(self, prompts: list[Sequence], settings: dict) -> list[str]:
        """The text after each prompt, up to the first stop string or the end of the document."""
        until = [text for text in settings["until"] if text]
        temperature = settings["temperature"] if settings["do_sample"] else 0
        tokens, count = self._padded(prompts), settings["max_gen_toks"]
        rows = torch.arange(len(prompts), device=self._device)
        lengths = torch.tensor([len(p) for p in prompts], device=self._device)
        mask = torch.arange(tokens.shape[1], device=self._device) < lengths.unsqueeze(1)
        cache, last = KVCache(tokens.shape[1] + count - 1), lengths - 1
        new: list[list[int]] = [[] for _ in prompts]
        texts, unfinished = [""] * len(prompts), set(range(len(prompts)))
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
            # What follows the end of a text is not used; its document must not end again.
            tokens = chosen.masked_fill(chosen == self.eot_token_id, 0).unsqueeze(1)
            last = torch.zeros_like(last)
            mask = torch.cat((mask, mask.new_ones(len(prompts), 1)), dim=1)
        return [t[: min((t.find(s) for s in until if s in t), default=None)] for t in texts]
