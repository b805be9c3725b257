"""A checkpoint as a model of lm-evaluation-harness: loglikelihood, rolling, generate_until.

Requests are sorted by length and batched with padding to the right, which no row ever sees: N
counts a sequence's own tokens only. What is longer than `max_length` loses its beginning. Contexts
are given as they are, without an end-of-text token before them, as the harness does by default; an
empty one becomes that token.
"""

import math
from collections.abc import Callable, Iterator

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from attention import KVCache
from evaluating.checkpoints import Checkpoint, open_checkpoints
from evaluating.protocol import arithmetic, progress
from lssar.errors import UserError
from model import GPT, sample
from training import distributed

BATCH = 16
NEW_TOKENS = 256  # where a request does not say; at most half of max_length
GENERATION_SETTINGS = {"do_sample", "temperature", "top_k", "top_p", "until", "max_gen_toks"}


@register_model("lssar")
class CheckpointLM(TemplateLM):
    """`lm_eval --model lssar --model_args checkpoint=RUN,max_length=2048`."""

    def __init__(
        self,
        checkpoint: str | Checkpoint,
        max_length: int | None = None,
        batch_size: int | str | None = None,
        device: str | None = None,
        precision: str = "auto",
        max_batch_size: int | None = None,  # lm_eval gives it to every model; there is no search
    ):
        super().__init__()
        if not isinstance(checkpoint, Checkpoint):
            (checkpoint,) = open_checkpoints([str(checkpoint)])
        self.checkpoint = checkpoint
        self._tokeniser = checkpoint.tokeniser()
        wanted = (device or "auto").split(":")[0]
        if wanted == "cuda" and not torch.cuda.is_available():
            wanted = "auto"  # lm_eval's command says cuda:0 where its user says nothing
        self._device = distributed.start(wanted).device
        self._model = checkpoint.load(self._device)
        self.max_length = max_length or checkpoint.task_length
        self.max_gen_toks = min(NEW_TOKENS, self.max_length // 2)
        self.batch_size = _batch_size(batch_size)
        self.precision = precision
        if self.max_length < 2:
            raise UserError(f"max_length {max_length}: must be at least 2")

    @property
    def eot_token_id(self) -> int:
        return self._tokeniser.eot

    @property
    def tokenizer_name(self) -> str:
        return self._tokeniser.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        return self._tokeniser.encode(string).tolist()

    # --- likelihoods -----------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_
    ) -> list[tuple[float, bool]]:
        inputs: dict[tuple[int, ...], list[int]] = {}  # what the model reads -> who asked for it
        for index, (_, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                raise UserError(
                    f"a continuation of {len(continuation)} tokens cannot be scored; it must have "
                    f"at least 1 and at most max_length = {self.max_length}"
                )
            context = context or [self.prefix_token_id]
            read = (context + continuation)[-self.max_length - 1 : -1]
            inputs.setdefault(tuple(read), []).append(index)
        answers: list = [None] * len(requests)
        with progress(len(requests), self.checkpoint.info.run, "request") as bar:
            for batch in self._batches(list(inputs)):
                for read, hidden in zip(batch, self._hidden(batch), strict=True):
                    for index in inputs[read]:
                        text, _, continuation = requests[index]
                        answers[index] = self._score(hidden, continuation)
                        self.cache_hook.add_partial("loglikelihood", text, answers[index])
                        bar.update()
        return answers

    def _batches(self, sequences: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
        """From the longest to the shortest; of one length where the mechanism asks for it."""
        alike = self._model.config.attention.length == "current"  # L, then, is the batch's width
        batch: list[tuple[int, ...]] = []
        for sequence in sorted(sequences, key=lambda s: (-len(s), s)):
            if len(batch) == self.batch_size or (alike and batch and len(sequence) < len(batch[0])):
                yield batch
                batch = []
            batch.append(sequence)
        if batch:
            yield batch

    @torch.inference_mode()
    def _hidden(self, batch: list[tuple[int, ...]]) -> Iterator[Tensor]:
        """The final hidden states (length, width) of each sequence."""
        tokens, _ = _right_padded(batch, self._device)
        with arithmetic(self.precision, self._device):
            hidden = self._model.hidden(tokens)
        return (row[: len(read)] for row, read in zip(hidden, batch, strict=True))

    @torch.inference_mode()
    def _score(self, hidden: Tensor, continuation: list[int]) -> tuple[float, bool]:
        with arithmetic(self.precision, self._device):
            logits = self._model.logits(hidden[-len(continuation) :])
        target = torch.tensor(continuation, device=self._device)
        likely = logits.log_softmax(-1).gather(1, target.unsqueeze(1)).sum().item()
        if not math.isfinite(likely):  # the harness would choose among NaN without a word
            raise UserError(f"{self.checkpoint.path}: the model's logits are not finite")
        return likely, bool((logits.argmax(-1) == target).all())

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        windows, owners = [], []
        for index, (text,) in enumerate(request.args for request in requests):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append(((text, ""), *make_disjoint_window(window)))
                owners.append(index)
        totals = [0.0] * len(requests)
        for owner, (likely, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += likely
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # --- generation ------------------------------------------------------------------------------

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(index)
        answers: list = [None] * len(requests)
        with progress(len(requests), self.checkpoint.info.run, "text") as bar:
            for members in groups.values():
                settings = self._settings(requests[members[0]].args[1])
                prompts: dict[tuple[int, ...], list[int]] = {}
                for index in members:
                    prompt = self._prompt(requests[index].args[0], settings["max_gen_toks"])
                    prompts.setdefault(prompt, []).append(index)
                for batch in self._batches(list(prompts)):
                    texts = self._continue(batch, settings)
                    for prompt, text in zip(batch, texts, strict=True):
                        for index in prompts[prompt]:
                            answers[index] = text
                            self.cache_hook.add_partial(
                                "generate_until", requests[index].args, text
                            )
                            bar.update()
        return answers

    def _settings(self, given: dict) -> dict:
        settings = normalize_gen_kwargs(given, self.max_gen_toks)
        if unknown := set(settings) - GENERATION_SETTINGS:
            raise UserError(
                f"generation setting {sorted(unknown)[0]!r} is not supported; a task may set "
                + ", ".join(sorted(GENERATION_SETTINGS))
            )
        if settings["max_gen_toks"] >= self.max_length:
            raise UserError(
                f"max_gen_toks {settings['max_gen_toks']} leaves no room for a prompt; give a "
                f"max_length above {self.max_length}"
            )
        return settings

    def _prompt(self, context: str, new_tokens: int) -> tuple[int, ...]:
        tokens = self.tok_encode(context) or [self.prefix_token_id]
        return tuple(tokens[-(self.max_length - new_tokens) :])

    def _continue(self, prompts: list[tuple[int, ...]], settings: dict) -> list[str]:
        """The text after each prompt, up to the first stop string or the end of the document."""
        until = [text for text in settings["until"] if text]

        def finished(tokens: list[int]) -> bool:
            text = self._tokeniser.decode(tokens)
            return tokens[-1] == self.eot_token_id or any(stop in text for stop in until)

        def choose(logits: Tensor) -> Tensor:
            options = {key: settings.get(key) for key in ("top_k", "top_p")}
            return sample(
                logits, settings["temperature"] if settings["do_sample"] else 0, **options
            )

        with arithmetic(self.precision, self._device):
            new = continue_batch(self._model, prompts, settings["max_gen_toks"], choose, finished)
        texts = []
        for tokens in new:
            text = self._tokeniser.decode(t for t in tokens if t != self.eot_token_id)
            texts.append(text[: min((text.find(s) for s in until if s in text), default=None)])
        return texts


@torch.inference_mode()
def continue_batch(
    model: GPT,
    prompts: list[tuple[int, ...]],
    new_tokens: int,
    choose: Callable[[Tensor], Tensor],
    finished: Callable[[list[int]], bool],
) -> list[list[int]]:
    """The new tokens after each prompt, through one KV cache, whatever the prompts' lengths."""
    device = model.embedding.weight.device
    tokens, mask = _right_padded(prompts, device)
    cache = KVCache(tokens.shape[1] + new_tokens - 1)
    new: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(len(prompts)))
    last = mask.sum(1) - 1  # where each row's newest token is among those just read
    rows = torch.arange(len(prompts), device=device)
    for _ in range(new_tokens):
        cache.mask = mask
        chosen = choose(model.logits(model.hidden(tokens, cache)[rows, last]))
        for row in sorted(open_rows):
            new[row].append(int(chosen[row]))
            if finished(new[row]):
                open_rows.discard(row)
        if not open_rows:
            break
        tokens, last = chosen.unsqueeze(1), torch.zeros_like(last)
        mask = torch.cat((mask, mask.new_ones(len(prompts), 1)), dim=1)
    return new


def _right_padded(sequences: list[tuple[int, ...]], device) -> tuple[Tensor, Tensor]:
    """Tokens (B, longest) and which of them are not padding."""
    rows = [torch.tensor(s) for s in sequences]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(s) for s in sequences])
    mask = torch.arange(tokens.shape[1]) < lengths.unsqueeze(1)
    return tokens.to(device), mask.to(device)


def _batch_size(given: int | str | None) -> int:
    try:
        size = BATCH if given is None else int(given)
    except ValueError:
        size = 0
    if size < 1:
        raise UserError(f"batch_size {given!r}: give a whole number of sequences, at least 1")
    return size
