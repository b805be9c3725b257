"""Chooses the device and the precision of a run, and joins its processes."""

import faulthandler
import functools
import os
import resource
import signal
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lssar.errors import UserError
from support.files import first_line

TIMEOUT = timedelta(minutes=10)
MEET = "start with torchrun, which sets MASTER_ADDR and MASTER_PORT"
MOST_DIGITS = 9  # of a rank
UNSET = "start with torchrun, which sets all three, or unset them"


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Return the element-wise sum over all processes, on every process."""
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def gather(self, values: Tensor) -> list[Tensor]:
        """Return the tensors of all processes, of the same shape, in rank order."""
        if self.size == 1:
            return [values]
        everyone = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(everyone, values)
        return everyone

    def barrier(self) -> None:
        self.sum(torch.zeros(1))


class StopSignal:
    """Turns SIGTERM and SIGINT into a stop after the step; a second one stops at once."""

    def __enter__(self) -> "StopSignal":
        self.received = 0
        numbers = (signal.SIGTERM, signal.SIGINT)
        self._previous = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def _handle(self, number: int, frame) -> None:
        self.received = number
        signal.signal(number, self._previous[number])

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def agreed(self, world: World) -> str | None:
        """Return the name of a signal that any rank has received, the same on all ranks."""
        number = int(max(world.gather(torch.tensor(self.received))))
        return signal.Signals(number).name if number else None


class Place(NamedTuple):
    """Holds the place of this process among the others, as torchrun's variables say."""

    rank: int
    world_size: int
    local_rank: int


def place() -> Place:
    """Read RANK, WORLD_SIZE and LOCAL_RANK, which belong together."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    given = {name: os.environ[name] for name in names if name in os.environ}
    for name, text in given.items():
        if not text.isascii() or not text.isdecimal() or len(text) > MOST_DIGITS:
            raise UserError(
                f"{name}={text!r:.50} in the environment is no whole number of processes; {UNSET}"
            )
    rank, size, local_rank = (int(given.get(name, "0")) for name in names)
    if "WORLD_SIZE" not in given:
        if rank or local_rank:
            found = ", ".join(f"{name}={text}" for name, text in given.items())
            raise UserError(f"{found} in the environment without WORLD_SIZE; {UNSET}")
        size = 1
    if size > 1 and "RANK" not in given:
        raise UserError(f"WORLD_SIZE={size} in the environment without RANK; {UNSET}")
    if not rank < size:
        raise UserError(f"RANK={rank} must be below WORLD_SIZE={size} in the environment; {UNSET}")
    if not local_rank < size:
        raise UserError(
            f"LOCAL_RANK={local_rank} must be below WORLD_SIZE={size} in the environment; {UNSET}"
        )
    return Place(rank, size, local_rank)


def world_size() -> int:
    """Return the number of processes that torchrun started."""
    return place().world_size


def start(device: str = "auto") -> World:
    """Join the process group that torchrun set up, or return a world of one."""
    rank, size, local_rank = place()
    chosen = _device(device, local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        torch.set_float32_matmul_precision("high")  # TF32
    if size > 1 and not dist.is_initialized():
        try:
            store, _, _ = next(dist.rendezvous("env://", timeout=TIMEOUT))
        except (ValueError, RuntimeError) as error:
            reason = first_line(error)
            raise UserError(f"process {rank} cannot meet the others ({reason}); {MEET}") from None
        # torchrun may keep its store over a restart, with the addresses of dead workers. Else each
        # start has a new one, and the nodes need not have counted the same restarts.
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = dist.PrefixStore(f"attempt-{restarts()}", store)
        # Values in main memory go through gloo, and so wait for no GPU.
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    return World(rank, size, chosen)


def restarts() -> int:
    """Return how often torchrun has restarted the workers."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(count) if count.isdecimal() else 0


def _device(name: str, local_rank: int) -> torch.device:
    if name == "auto":
        without_cuda = "mps" if torch.backends.mps.is_available() else "cpu"
        name = "cuda" if torch.cuda.is_available() else without_cuda
    if name == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps: no Apple GPU found; use --device cpu, or leave it out")
    if name != "cuda":
        return torch.device(name)
    count = torch.cuda.device_count()
    if count == 0:
        raise UserError("--device cuda: no GPU found; use --device cpu, or leave it out")
    if local_rank >= count:
        found = f"process {local_rank} of this machine has no GPU: {count} found"
        raise UserError(f"{found}; start torchrun with --nproc_per_node={count}")
    return torch.device("cuda", local_rank)


def product_type(device: str | torch.device, precision: str) -> torch.dtype:
    """Return the type of products; "auto": bfloat16 on a GPU that has it, else float32.

    A V100 and a T4 do not have it; a GPU that is planned with, by its name alone, does.
    """
    bf16 = precision == "bf16" or (precision == "auto" and torch.device(device).type == "cuda")
    if bf16 and precision == "auto" and isinstance(device, torch.device):
        bf16 = torch.cuda.get_device_capability(device)[0] >= 8
    return torch.bfloat16 if bf16 else torch.float32


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context in which products are of `product_type`."""
    bf16 = product_type(device, precision) == torch.bfloat16
    if bf16 and device.type == "cpu":
        _avoid_missing_amx()
    return torch.autocast(device.type, torch.bfloat16, enabled=bf16)


@functools.cache
def _avoid_missing_amx() -> None:
    """Keep oneDNN from AMX instructions that the processor announces but does not execute.

    Some hypervisors pass on the flag without the feature, and the first product in bfloat16 ends
    the process (SIGILL). oneDNN reads its environment once, at its first use.
    """
    info = Path("/proc/cpuinfo")
    if not info.exists() or "amx_tile" not in info.read_text() or _bf16_works():
        return
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"
    setting = "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"
    if not _bf16_works():
        raise UserError(f"bf16 fails on this processor; set {setting}, or use precision fp32")
    print(f"bf16 without AMX, which this machine announces but lacks ({setting})", file=sys.stderr)


def _bf16_works() -> bool:
    """Return whether a forked child survives a product large enough to be worth AMX."""
    child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            torch.set_num_threads(1)  # the parent's threads do not exist here
            F.linear(*torch.ones(2, 64, 64, dtype=torch.bfloat16))
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) >= 0


def lost_contact(error: RuntimeError) -> bool:
    """Return whether a collective failed because another process went away."""
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "timed out")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


def finish() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def gather_rng(world: World) -> list[dict[str, Tensor]]:
    """Return the random states of all ranks."""
    states = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(world.device)
    gathered = {kind: world.gather(state) for kind, state in states.items()}
    return [{kind: gathered[kind][rank] for kind in gathered} for rank in range(world.size)]


def restore_rng(states: list[dict[str, Tensor]], world: World) -> None:
    """Set this rank's random state, if the run that saved the states had this rank."""
    if world.rank < len(states):
        state = states[world.rank]
        torch.set_rng_state(state["cpu"])
        if world.device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], world.device)
