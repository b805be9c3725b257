"""torchrun --standalone --nproc_per_node=8 train.py configs/gpt2-124m-lssar.toml [--a.b=value ...]

Trains one model. `python train.py CONFIG` runs the same on one GPU, a Mac or a CPU.

    --resume                      continue from the run's latest checkpoint, bit for bit
    --accept-data                 resume even if the data set changed
    --dry-run [--world-size 8]    print sizes, batch arithmetic, memory and hours; train nothing
    --gpu 4090|a100|h100|...      with --dry-run: the GPU to plan for (training/gpus.py); default:
                                  the one here, else an A100
    --status                      print where the run is: exit code 0 finished, 75 stopped after
                                  saving, 1 neither; train nothing
    --device cpu|cuda|mps         default: the best there is; for --dry-run: cuda

Exit codes: 0 finished, 2 a mistake in the input, 3 stopped by non-finite steps, 4 another rank
died, 75 stopped by SIGTERM or SIGINT after saving (rerun with --resume). torchrun turns all of
them but 0 into 1: use --status there.
"""

import contextlib
import functools
import math
import sys
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from data.identity import check_data_unchanged, identity
from data.loader import Batches
from data.tokeniser import get_tokeniser, text_bytes
from lssar.backends import used_backend
from lssar.errors import UserError
from support import command
from support.files import first_line, lookup
from training import checkpoint, distributed, estimate
from training.arguments import TrainingParser
from training.batch_plan import batch_plan
from training.config import Config, load_config
from training.distributed import StopSignal, World
from training.optimiser import Optimiser
from training.recovery import Diverged, UncheckedSteps, refuse_infinite_weights
from training.run_log import RUN, RunLog, machine, other_machine
from training.sizing import halve_until_it_fits

EXIT_DIVERGED = 3
EXIT_LOST_CONTACT = 4
EXIT_PREEMPTED = 75


def main(argv: list[str], kind: type[Config] = Config) -> int:
    """Train the model of a kind of config: GPT-2, or that of physics/train.py."""
    arguments, overrides = TrainingParser(__doc__).parse(argv)
    size = arguments.world_size if arguments.dry_run else distributed.world_size()
    config = load_config(arguments.config, overrides, size, kind)
    config, notice = config.cut_warmup()
    if arguments.dry_run:
        lines = estimate.dry_run(config, size, arguments.device, arguments.gpu)
        print("\n".join([*lines, *filter(None, [notice])]))
        return 0
    if arguments.status:
        return status(config)
    world = distributed.start(arguments.device)
    # torchrun restarts failed workers with the command line they had.
    resume = arguments.resume or distributed.restarts() > 0
    try:
        with RunLog(config, world) as log, StopSignal() as stop:
            if notice:
                log.say(notice)
            return train(set_up(config, world, log, resume, arguments.accept_data), stop)
    except Diverged as error:
        if world.is_main:
            print(f"error: {error}", file=sys.stderr)
        return EXIT_DIVERGED
    except RuntimeError as error:
        if command.out_of_memory(error):
            raise UserError(
                f"rank {world.rank}: {first_line(error)}; lower train.micro_batch (the result "
                "stays the same) or the model, and use --resume"
            ) from None
        if world.size == 1 or not distributed.lost_contact(error):
            raise
        print(
            f"error: rank {world.rank} lost contact with another rank, which died or hangs; "
            f"see that rank's messages; rerun with --resume ({first_line(error)})",
            file=sys.stderr,
        )
        return EXIT_LOST_CONTACT
    finally:
        distributed.finish()


def status(config: Config) -> int:
    """Print how far the run is, and return that as an exit code."""
    directory = config.run_directory
    steps = config.train.steps
    step = 0
    with contextlib.suppress(UserError):
        step = checkpoint.read_info(checkpoint.find(directory)).step
    saved = f"{directory}: {step} of {steps} steps are saved"
    if step >= steps:
        print(f"{saved}; finished")
        return 0
    if stopped := lookup(directory / RUN, "stopped"):
        print(f"{saved}; stopped {stopped}")
        return EXIT_PREEMPTED
    print(f"{saved}; not finished")
    return 1


@dataclass
class Run:
    """Holds the parts of a run that the loop works with."""

    config: Config
    world: World
    log: RunLog
    store: checkpoint.Store
    batches: Batches
    data: dict  # the identity of the data set
    model: nn.Module
    replica: nn.Module  # the model, or its DistributedDataParallel: forward and backward
    optimiser: Optimiser
    autocast: torch.autocast
    progress: checkpoint.Progress
    unchecked: UncheckedSteps = field(default_factory=UncheckedSteps)
    reported: int = 0  # the last step that was reported
    seconds: float = 0.0  # spent on steps since then


def set_up(
    config: Config,
    world: World,
    log: RunLog,
    resume: bool = False,
    accept_data: bool = False,
) -> Run:
    """Open the data, make or load the model and its optimiser, and fit the micro-batch."""
    t = config.train

    # The data, and the checkpoints so far.
    batches = make_batches(config, world)
    data = identity(batches.train_set, batches.val_set)
    store = checkpoint.Store(config.run_directory)
    if not resume:
        checkpoint.refuse_existing(config, store)
    if world.is_main:
        store.remove_leftovers()  # of a run that was killed; the lock is ours

    # The model: that of the latest checkpoint, or a new one, perhaps with another run's weights.
    estimate.refuse_too_large(config, world.device)
    torch.manual_seed(t.seed)
    saved = checkpoint.load_latest(config, store) if resume else None
    if saved is not None:
        model, progress, state = saved
        warn_of_changes(state, data, batches, world, log, accept_data)
        if world.is_main:
            store.repair(state["path"], progress, config.checkpoint.keep)
    else:
        model = config.make_model()
        progress = checkpoint.Progress()
        if t.init_from:
            checkpoint.load_weights(model, t.init_from, config.fresh_parameters())
    if t.micro_batch == "auto":
        before = state["config"].micro_batch if saved else 0
        config = estimate.choose_micro_batch(config, world, before, log.say)
        batches = make_batches(config, world)
    for notice in batches.notices:
        log.say(notice)
    model.to(world.device).use_backend(config.attention.backend)

    # The optimiser, and the random numbers.
    optimiser = Optimiser(model, t)
    if saved is not None:
        moments = state["optimiser"]["state"]
        optimiser.load_state_dict({**optimiser.state_dict(), "state": moments})
        distributed.restore_rng(state["rng"], world)
    elif t.init_optimiser:
        checkpoint.load_moments(optimiser, t.init_from)

    # How it is computed: compiled, on several processes, in bfloat16.
    if t.compile:
        model.compile()
    replica = model
    if world.size > 1:
        replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    autocast = distributed.autocast(world.device, t.precision)
    run = Run(
        config=config,
        world=world,
        log=log,
        store=store,
        batches=batches,
        data=data,
        model=model,
        replica=replica,
        optimiser=optimiser,
        autocast=autocast,
        progress=progress,
    )
    if t.micro_batch == "auto":

        def rehearse_with(config: Config) -> None:
            run.batches = make_batches(config, world)
            rehearse(run)

        run.config = halve_until_it_fits(config, world, rehearse_with, log.say)
    run.reported = progress.step
    log.start(progress.step, estimate.summary(run.config, world.size, world.device.type))
    return run


def make_batches(config: Config, world: World) -> Batches:
    """Open the data, and make this rank's batches."""
    return config.make_batches(batch_plan(config, world.size), world.rank, world.device)


def warn_of_changes(
    state: dict, data: dict, batches: Batches, world: World, log: RunLog, accept_data: bool
) -> None:
    """Warn if data or machine differ from the checkpoint's; refuse other data."""
    folder = batches.train_set.directory
    changed = check_data_unchanged(state["data"], data, folder, accept_data)
    for warning in (changed, other_machine(state["machine"], machine(world))):
        if warning:
            log.say(f"warning: {warning}")


def train(run: Run, stop: StopSignal) -> int:
    """Train to the last step; returns the exit code."""
    config, world, log, progress = run.config, run.world, run.log, run.progress
    t = config.train
    started = progress.step
    while progress.step < t.steps:
        # One optimiser step on the global batch, which waits for no number of the device.
        began = time.perf_counter()
        optimiser_step(run)
        run.seconds += time.perf_counter() - began
        log.bar.update()
        step = progress.step
        finished = step == t.steps

        # Once, after the first step: the backends that compute the attention.
        if step == started + 1:
            log.backends(used_backends(config))

        # Once in a while: report the loss and the speed.
        if step % config.log.interval == 0 or finished:
            report(run)

        # Once in a while: the loss on the validation set.
        if step % config.eval.interval == 0 or finished:
            validate(run)

        # Once in a while: some text.
        if config.eval.sample_interval and step % config.eval.sample_interval == 0:
            sample(run)

        # Once in a while, at the end, and when any rank was asked to stop: a checkpoint.
        stopping = stop.agreed(world)
        if step % config.checkpoint.interval == 0 or finished or stopping:
            save(run)
        if stopping and not finished:
            log.stopped(step, stopping)
            return EXIT_PREEMPTED
    log.finish(progress.step)
    return 0


def used_backends(config: Config) -> list[str]:
    """List the backends that computed the attention of the layers."""
    layers = config.model_config().all_layers
    return list(dict.fromkeys(str(used_backend(layer.attention)) for layer in layers))


def optimiser_step(run: Run) -> None:
    """Take one step, which does nothing if the loss or the gradient is not finite."""
    t = run.config.train
    step = run.progress.step
    warmed = min(1.0, step / max(1, t.warmup))
    run.optimiser.set_rates(learning_rate(run.config, step), warmed)
    losses = torch.stack(run.world.gather(accumulate(run, step)))  # by rank
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), t.clip or math.inf)
    numbers = torch.cat((norm.view(1), losses))
    run.optimiser.step(skip=~numbers.isfinite().all())
    run.optimiser.zero_grad(set_to_none=True)
    run.unchecked.add(numbers)
    run.progress.step = step + 1
    run.progress.val_loss = None


def learning_rate(config: Config, step: int) -> float:
    """Warm up linearly to lr, then follow a cosine to zero at the last step, or stay constant."""
    t = config.train
    if step < t.warmup:
        return t.lr * (step + 1) / t.warmup
    if t.schedule == "constant":
        return t.lr
    return t.lr * 0.5 * (1 + math.cos(math.pi * (step - t.warmup) / (t.steps - t.warmup)))


def accumulate(run: Run, step: int) -> Tensor:
    """Add the gradients of the mean loss over the global batch; returns this rank's part of it."""
    loader = run.batches.loader
    total = torch.zeros((), device=run.world.device)
    divisors = loader.divisors(step)
    for i, (inputs, targets) in enumerate(loader.micro_batches(step)):
        last = i == len(divisors) - 1
        total += backward(run, inputs, targets, divisors[i], sync=last)
    return total


def backward(run: Run, inputs: Tensor, targets: Tensor, divisor: float, sync: bool) -> Tensor:
    """Add the gradients of the mean loss over the divisor, and return that quotient.

    `sync`: average the gradients over the ranks, once per step.
    """
    alone = run.world.size == 1
    with contextlib.nullcontext() if sync or alone else run.replica.no_sync():
        with run.autocast:
            loss = run.replica(inputs, targets) / divisor
        loss.backward()
    return loss.detach()


def rehearse(run: Run) -> None:
    """Run two micro-batches and a skipped optimiser step, to see whether a step fits the memory.

    The weights do not change, and no other rank takes part.
    """
    skip = torch.ones((), dtype=torch.bool, device=run.world.device)
    try:
        for _ in range(2):
            inputs, targets = next(run.batches.loader.micro_batches(run.progress.step))
            backward(run, inputs, targets, 1, sync=False)
            run.optimiser.step(skip)
    finally:
        run.optimiser.zero_grad(set_to_none=True)


def check_finished_steps(run: Run) -> None:
    """Wait for the steps so far; say which were skipped, and stop a run that has diverged."""
    began = time.perf_counter()
    run.unchecked.check_finished_steps(
        run.progress, run.config, run.store, run.batches.loader, run.log.say
    )
    run.seconds += time.perf_counter() - began


def report(run: Run) -> None:
    """Show and record the loss and the speed since the last report."""
    check_finished_steps(run)
    t = run.config.train
    step = run.progress.step
    seconds = run.seconds / (step - run.reported)  # per step
    rate = t.batch_tokens / seconds
    peak = estimate.peak_flops(run.world.device)
    mfu = None
    if peak is not None:
        flops = t.per_token(functools.partial(estimate.flops_per_token, run.model))
        mfu = flops * rate / (peak * run.world.size)
    run.log.step(
        step,
        loss=torch.tensor(run.unchecked.losses).mean().item(),
        lr=run.optimiser.param_groups[0]["lr"],
        grad_norm=run.unchecked.norm,
        tokens_per_s=rate,
        mfu=mfu,
        seconds_left=(t.steps - step) * seconds,
    )
    run.reported = step
    run.seconds = 0.0


@torch.no_grad()
def validate(run: Run) -> None:
    """Take the mean loss over fixed tokens, shared by the ranks; uses no random numbers."""
    check_finished_steps(run)
    device = run.world.device
    total = torch.zeros(3, dtype=torch.float64)  # summed loss, tokens, bytes of their text
    lengths = text_bytes(run.batches.val_set.tokeniser)
    for inputs, targets in run.batches.validation():
        with run.autocast:
            mean = run.model(inputs.to(device), targets.to(device))
        # Every token counts. Labels of physics/ may be NaN, and do not count then.
        count = int(targets.isfinite().sum())
        size = 0 if lengths is None else lengths[targets.numpy()].sum()
        total += torch.tensor([mean.item() * count, count, size], dtype=torch.float64)
    summed, tokens, size = run.world.sum(total).tolist()
    run.progress.val_loss = summed / tokens
    bits_per_byte = summed / size / math.log(2) if size else None
    run.log.validation(run.progress.step, run.progress.val_loss, bits_per_byte)


def sample(run: Run) -> None:
    """Print some text, drawn from a random stream of its own."""
    check_finished_steps(run)
    name = run.batches.train_set.tokeniser
    if not run.world.is_main or name is None:
        return
    e = run.config.eval
    step = run.progress.step
    tokeniser = get_tokeniser(name)
    ids = tokeniser.encode(e.sample_prompt).tolist() or [tokeniser.eot]
    prompt = torch.tensor([ids], device=run.world.device)
    generator = torch.Generator(run.world.device).manual_seed(step)
    with run.autocast:
        out = run.model.generate(prompt, e.sample_tokens, top_k=50, generator=generator)
    run.log.say(f"sample at step {step}: {tokeniser.decode(out[0].tolist())}")


def save(run: Run) -> None:
    """Write a checkpoint: on rank 0, with the random numbers of all ranks."""
    check_finished_steps(run)
    config, progress = run.config, run.progress
    refuse_infinite_weights(run.model, progress.step, config, run.store)
    rng = distributed.gather_rng(run.world)
    if run.world.is_main:
        best = progress.val_loss is not None and progress.val_loss < progress.best
        if best:
            progress.best = progress.val_loss
        info = checkpoint.CheckpointInfo(
            run=config.log.name,
            step=progress.step,
            train_length=config.train.length,
            tokeniser=run.batches.train_set.tokeniser,
            val_loss=progress.val_loss,
            seed=config.train.seed,
        )
        state = {
            "config": config.to_toml(),
            "progress": vars(progress),
            "rng": rng,
            "data": run.data,
            "optimiser": run.optimiser.state_dict(),
            "machine": machine(run.world),
        }
        run.log.sync()  # the checkpoint implies the metrics up to its step
        run.store.save(run.model, info, state, keep=config.checkpoint.keep, best=best)
    run.world.barrier()


if __name__ == "__main__":
    command.run(main)
