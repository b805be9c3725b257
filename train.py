"""torchrun --standalone --nproc_per_node=8 train.py configs/gpt2-124m-lssar.toml [--a.b=value ...]

Trains one model. `python train.py CONFIG` runs the same on one GPU, a Mac or a CPU.

    --resume                      continue from the run's latest checkpoint, bit for bit
    --accept-data                 resume even though the data are not those of the checkpoint
    --dry-run [--world-size 8]    print sizes, batch arithmetic, memory and hours; train nothing
    --gpu 4090|a100|h100|...      for --dry-run: the GPU to count hours of (training/devices.toml);
                                  default: the one here, else an A100
    --status                      print where the run is: exit code 0 finished, 75 stopped after
                                  saving, 1 neither; train nothing
    --device cpu|cuda|mps         default: the best there is; for --dry-run: cuda

Exit codes: 0 finished, 2 a mistake in the input, 3 stopped by non-finite steps, 4 another rank
died, 75 stopped by SIGTERM or SIGINT after saving (rerun with --resume). torchrun turns all of
them but 0 into 1: use --status there.
"""

import contextlib
import math
import sys
import time
from argparse import Namespace

from lssar.errors import UserError
from support.command import Parser, answer_early, out_of_memory, positive, run
from training.config import Config, load_config, read_config
from training.hours import DEVICES


def parse_arguments(argv: list[str]) -> tuple[Namespace, list[str]]:
    """The options, and `--section.key=value` arguments that change the config."""
    parser = Parser(__doc__)
    parser.add_argument("config", help="a file of configs/")
    for flag in ("--resume", "--accept-data", "--dry-run", "--status"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--world-size", type=positive, default=1, help="for --dry-run")
    parser.add_argument("--gpu", choices=tuple(DEVICES), help="for --dry-run")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
    arguments, overrides = parser.parse_known_args(argv)
    if arguments.gpu and not (arguments.dry_run and arguments.device in ("auto", "cuda")):
        raise UserError(f"--gpu {arguments.gpu} is for the --dry-run of a GPU; leave it out")
    read_config(arguments.config, overrides)  # raises for a name that does not exist
    return arguments, overrides


if __name__ == "__main__":  # --help and mistakes need no torch, which takes seconds to import
    answer_early(parse_arguments)

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from data.identity import identity, resumed
from data.loader import Batches
from data.tokeniser import get_tokeniser, text_bytes
from lssar.backends import used_backend
from support.files import first_line, lookup
from training import checkpoint, distributed, estimate
from training.distributed import StopSignal, World
from training.optimiser import Optimiser
from training.run_log import RUN, RunLog, machine, other_machine

SMALLER = "lower train.micro_batch (the result stays the same) or the model, and use --resume"
EXIT_DIVERGED, EXIT_LOST_CONTACT, EXIT_PREEMPTED = 3, 4, 75


def main(argv: list[str]) -> int:
    arguments, overrides = parse_arguments(argv)
    size = arguments.world_size if arguments.dry_run else distributed.world_size()
    config = load_config(arguments.config, overrides, size)
    if arguments.dry_run:
        print("\n".join(estimate.dry_run(config, size, arguments.device, arguments.gpu)))
        return 0
    if arguments.status:
        return status(config)
    world = distributed.start(arguments.device)
    # torchrun restarts failed workers with the command line they had.
    resume = arguments.resume or distributed.restarts() > 0
    try:
        with RunLog(config, world) as log, StopSignal() as stop:
            return train(Run(config, world, log, resume, arguments.accept_data), stop)
    except Diverged as error:
        if world.is_main:
            print(f"error: {error}", file=sys.stderr)
        return EXIT_DIVERGED
    except RuntimeError as error:
        if out_of_memory(error):
            raise UserError(f"rank {world.rank}: {first_line(error)}; {SMALLER}") from None
        if world.size == 1 or not distributed.lost_contact(error):
            raise
        lost = f"rank {world.rank} lost contact with another rank, which died or hangs"
        advice = f"see that rank's messages; rerun with --resume ({first_line(error)})"
        print(f"error: {lost}; {advice}", file=sys.stderr)
        return EXIT_LOST_CONTACT
    finally:
        distributed.finish()


def status(config: Config) -> int:
    """Print how far the run is, and return that as an exit code."""
    directory, steps, step = config.run_directory, config.train.steps, 0
    with contextlib.suppress(UserError):
        step = checkpoint.read_description(checkpoint.find(directory))[1].step
    how = "finished" if step >= steps else lookup(directory / RUN, "stopped")
    print(f"{directory}: {step} of {steps} steps are saved; {how or 'not finished'}")
    return 0 if step >= steps else EXIT_PREEMPTED if how else 1


def train(run: "Run", stop: StopSignal) -> int:
    """The loop. Returns the exit code."""
    config, progress = run.config, run.progress
    started = progress.step
    while progress.step < config.train.steps:
        run.optimiser_step()
        if progress.step == started + 1:
            layers = config.model_config().all_layers
            used = dict.fromkeys(str(used_backend(layer.attention)) for layer in layers)
            run.log.say(f"attention  computed by backend {', '.join(used)}")

        # Once in a while: report, validate, sample, save.
        finished = progress.step == config.train.steps
        if progress.step % config.log.interval == 0 or finished:
            run.report()
        if progress.step % config.eval.interval == 0 or finished:
            run.validate()
        if config.eval.sample_interval and progress.step % config.eval.sample_interval == 0:
            run.sample()
        stopping = stop.agreed(run.world)
        if progress.step % config.checkpoint.interval == 0 or finished or stopping:
            run.save()
        if stopping and not finished:
            run.log.stopped(progress.step, stopping)
            return EXIT_PREEMPTED
    run.log.finish(progress.step)
    return 0


def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up to lr, then cosine to zero at the last step, or constant."""
    t = config.train
    if step < t.warmup:
        return t.lr * (step + 1) / t.warmup
    if t.schedule == "constant":
        return t.lr
    return t.lr * 0.5 * (1 + math.cos(math.pi * (step - t.warmup) / (t.steps - t.warmup)))


class Run:
    """Everything one run needs, made in order, and what the loop does with it."""

    def __init__(self, config: Config, world: World, log: RunLog, resume: bool, accept_data=False):
        self.world, self.log, t = world, log, config.train
        self._split(config)
        self.data = identity(self.batches.train_set, self.batches.val_set)
        self.store = checkpoint.Store(config.run_directory)
        if world.is_main:
            self.store.remove_leftovers()  # of a run that was killed; the lock is ours

        estimate.refuse_too_large(config, world.device)
        torch.manual_seed(t.seed)
        self.model, self.progress, saved = checkpoint.initial_state(config, self.store, resume)
        if saved is not None:
            folder, share = self.batches.train_set.directory, slice(world.rank, None, world.size)
            data = resumed(saved["data"], self.data, folder, accept_data, share)
            for warning in filter(None, (data, other_machine(saved["machine"], machine(world)))):
                log.say(f"warning: {warning}")
        if t.micro_batch == "auto":
            before = saved["config"].micro_batch if saved else 0
            self._split(estimate.choose_micro_batch(config, world, before, log.say))
        self.model.to(world.device).use_backend(config.attention.backend)
        self.optimiser = Optimiser(self.model, t)
        if saved is not None:
            self.optimiser.load_state_dict(saved["optimiser"])
            distributed.restore_rng(saved["rng"], world)
        elif t.init_optimiser:
            checkpoint.take_optimiser(self.optimiser, t.init_from)
        if t.compile:
            self.model.compile()
        self.replica = self.model  # what forward and backward go through
        if world.size > 1:
            self.replica = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.autocast = distributed.autocast(world.device, t.precision)

        if t.micro_batch == "auto":
            self._rehearse()
        self.numbers: list[Tensor] = []  # (norm, losses by rank) of each step that is not settled
        self.reported, self.seconds = (
            self.progress.step,
            0.0,
        )  # the last step reported, the time since
        self.log.start(self.reported, estimate.summary(self.config, world.size, world.device.type))

    def _split(self, config: Config) -> None:
        """Take the micro-batch of this config. What one step computes does not depend on it."""
        self.config, plan = config, estimate.batch_plan(config, self.world.size)
        self.batches = Batches(config, plan, self.world.rank, self.world.device)

    def _rehearse(self) -> None:
        """Halve the micro-batch until every rank has room for a step. Changes nothing else."""
        while any(self.world.gather(torch.tensor(not self._has_room()))):
            sequences = self.config.micro_batch
            failed = f"out of memory with train.micro_batch = {sequences}"
            if sequences == 1:
                raise UserError(f"{failed}; lower train.length, model.width or model.layers")
            self.log.say(f"warning: {failed}; the step starts again with {sequences // 2}")
            torch.cuda.empty_cache()
            if self.config.train.compile:  # or the second shape would be compiled for any shape
                torch.compiler.reset()
            self._split(self.config.with_micro_batch(sequences // 2))

    def _has_room(self) -> bool:
        """Whether gradients, optimiser and activations fit beside one another, as in every step
        but the first. Without collectives: a rank that fails must not leave the others waiting."""
        skip = torch.ones((), dtype=torch.bool, device=self.world.device)
        try:
            for _ in range(2):
                inputs, targets = next(self.batches.loader.micro_batches(self.progress.step))
                self._backward(inputs, targets, 1, synchronise=False)
                self.optimiser.step(skip)
            return True
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            return False
        finally:
            self.optimiser.zero_grad(set_to_none=True)

    def optimiser_step(self) -> None:
        """One step on the global batch, which does nothing if the loss or the gradient is not
        finite. Waits for no result: `settle` does."""
        began, p, t = time.perf_counter(), self.progress, self.config.train
        warmed = min(1.0, p.step / max(1, t.warmup))
        self.optimiser.set_rates(learning_rate(self.config, p.step), warmed)
        losses = torch.stack(self.world.gather(self._accumulate(p.step)))  # by rank
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), t.clip or math.inf)
        self.numbers.append(torch.cat((norm.view(1), losses)))
        self.optimiser.step(skip=~self.numbers[-1].isfinite().all())
        self.optimiser.zero_grad(set_to_none=True)
        p.step, p.val_loss = p.step + 1, None
        self.log.bar.update()
        self.seconds += time.perf_counter() - began

    def settle(self) -> None:
        """Wait for the steps so far, and tell which of them were skipped."""
        began, p, first = time.perf_counter(), self.progress, self.progress.step - len(self.numbers)
        rows = torch.stack(self.numbers).tolist() if self.numbers else []
        self.seconds += time.perf_counter() - began
        self.numbers.clear()
        for step, (self.norm, *self.losses) in enumerate(rows, start=first):
            if math.isfinite(self.norm) and all(map(math.isfinite, self.losses)):
                p.skipped = 0
                continue
            p.skipped += 1
            offsets = self.batches.loader.offsets(step)
            numbers = f"gradient norm {self.norm}, loss by rank {self.losses}"
            numbers += f", batch of token offsets {offsets.min()}..{offsets.max()}"
            self.log.say(f"warning: step {step} is not finite and was skipped: {numbers}")
            if p.skipped > self.config.train.max_skipped_steps:
                what = f"{p.skipped} steps in a row were not finite, the last was {step}"
                raise self._diverged(f"{what} (their batches are above)")

    def _accumulate(self, step: int) -> Tensor:
        """Gradients of the mean loss over the global batch; returns this rank's part of it."""
        loader, total = self.batches.loader, torch.zeros((), device=self.world.device)
        divisors = loader.divisors(step)
        for i, (inputs, targets) in enumerate(loader.micro_batches(step)):
            last = i == len(divisors) - 1
            total += self._backward(inputs, targets, divisors[i], synchronise=last)
        return total

    def _backward(self, inputs: Tensor, targets: Tensor, divisor: float, synchronise: bool):
        """Add the gradients of the mean loss over the divisor, and return that quotient."""
        alone = synchronise or self.world.size == 1
        with contextlib.nullcontext() if alone else self.replica.no_sync():
            with self.autocast:
                loss = self.replica(inputs, targets) / divisor
            loss.backward()
        return loss.detach()

    def report(self) -> None:
        self.settle()
        t, step = self.config.train, self.progress.step
        pace = self.seconds / (step - self.reported)  # per step
        rate = t.batch_tokens / pace
        peak = estimate.peak_flops(self.world.device)
        self.log.step(
            step,
            loss=torch.tensor(self.losses).mean().item(),
            lr=self.optimiser.param_groups[0]["lr"],
            grad_norm=self.norm,
            tokens_per_s=rate,
            mfu=peak and t.per_token(self.model.flops_per_token) * rate / (peak * self.world.size),
            seconds_left=(t.steps - step) * pace,
        )
        self.reported, self.seconds = step, 0.0

    @torch.no_grad()
    def validate(self) -> None:
        """Mean loss over fixed tokens, shared by the ranks; uses no random numbers."""
        self.settle()
        total = torch.zeros(3, dtype=torch.float64)  # summed loss, tokens, bytes of their text
        lengths = text_bytes(self.batches.val_set.tokeniser)
        for inputs, targets in self.batches.validation():
            with self.autocast:
                mean = self.model(inputs.to(self.world.device), targets.to(self.world.device))
            count = int(targets.isfinite().sum())  # a missing label is NaN
            size = 0 if lengths is None else lengths[targets.numpy()].sum()
            total += torch.tensor([mean.item() * count, count, size], dtype=torch.float64)
        summed, tokens, size = self.world.sum(total).tolist()
        self.progress.val_loss = summed / tokens
        bits = summed / size / math.log(2) if size else None
        self.log.validation(self.progress.step, self.progress.val_loss, bits)

    def sample(self) -> None:
        """Print some text, drawn from a random stream of its own."""
        self.settle()
        name, e = self.batches.train_set.tokeniser, self.config.eval
        if not self.world.is_main or name is None:
            return
        tokeniser = get_tokeniser(name)
        ids = tokeniser.encode(e.sample_prompt).tolist() or [tokeniser.eot]
        prompt = torch.tensor([ids], device=self.world.device)
        generator = torch.Generator(self.world.device).manual_seed(self.progress.step)
        with self.autocast:
            out = self.model.generate(prompt, e.sample_tokens, top_k=50, generator=generator)
        self.log.say(f"sample at step {self.progress.step}: {tokeniser.decode(out[0].tolist())}")

    def save(self) -> None:
        self.settle()
        p, config = self.progress, self.config
        if not all(weight.isfinite().all() for weight in self.model.parameters()):
            raise self._diverged(f"after step {p.step - 1} the weights are not finite, nor saved")
        rng = distributed.gather_rng(self.world)
        if self.world.is_main:
            best = p.val_loss is not None and p.val_loss < p.best
            p.best = p.val_loss if best else p.best
            t, tokeniser = config.train, self.batches.train_set.tokeniser
            about = (config.log.name, p.step, t.length, tokeniser, p.val_loss, t.seed)
            info = checkpoint.CheckpointInfo(*about)
            state = {"config": config.to_toml(), "progress": vars(p), "rng": rng, "data": self.data}
            state |= {"optimiser": self.optimiser.state_dict(), "machine": machine(self.world)}
            self.store.save(self.model, info, state, keep=config.checkpoint.keep, best=best)
        self.world.barrier()

    def _diverged(self, what: str) -> "Diverged":
        saved = self.store.candidates()
        last = f"the last good checkpoint is {saved[0]}" if saved else "no checkpoint was saved"
        return Diverged(f"{what}; {last}; lower train.lr (now {self.config.train.lr:g})")


class Diverged(RuntimeError):
    """The numbers are no longer finite."""


if __name__ == "__main__":
    run(main)
