"""python tests/stand_in.py SCRIPT.py ARGUMENTS: a script on two GPUs that are not there.

The process gets two CUDA devices that compute on the CPU (`stand_in.cpp`): tensors, autograd,
autocast and every choice of ours are those of a GPU, and a tensor on the wrong device is an error.
With TRITON_INTERPRET=1 the Triton kernels run on them too, in the interpreter, and each launch is
checked first (`triton_launch.py`). "nccl" is gloo. torch.compile takes whole graphs, a break is an
error, and runs them without Inductor, which needs a driver.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[1]
SOURCE = Path(__file__).with_name("stand_in.cpp")
A100 = SimpleNamespace(name="NVIDIA A100-SXM4-80GB", major=8, minor=0, total_memory=80 * 2**30)


def build() -> Path:
    """Return the library, from the cache of our CPU kernel or compiled now."""
    torch_path = Path(importlib.util.find_spec("torch").origin).parent
    version = (torch_path / "version.py").read_bytes()
    key = hashlib.sha256(SOURCE.read_bytes() + version + bytes(torch_path)).hexdigest()[:24]
    cache = Path(os.environ.get("LSSAR_CACHE") or Path.home() / ".cache/lssar")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache).close()
    except OSError:  # run by its path, as `lssar` itself would import torch
        cache = runpy.run_path(str(ROOT / "lssar/folders.py"))["private_folder"]()
    library = cache / f"stand_in-{key}.so"
    if not library.exists():
        partial = library.with_suffix(f".{os.getpid()}")
        flags = ["-std=c++20", "-O0", "-fPIC", "-shared", f"-I{torch_path}/include"]
        links = [f"-L{torch_path}/lib", f"-Wl,-rpath,{torch_path}/lib", "-ltorch_cpu", "-lc10"]
        compiler = os.environ.get("CXX", "c++")
        subprocess.run([compiler, *flags, SOURCE, *links, "-o", partial], check=True)
        partial.replace(library)
    return library


if __name__ == "__main__":  # torch looks for CUDA once, while it is imported
    ctypes.CDLL(str(build()), ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


def install() -> None:
    """Replace what of torch.cuda is Python or bound to it."""
    ops, c, cuda = torch.ops.stand_in, torch._C, torch.cuda
    count = ops.device_count()
    c._cuda_getDeviceCount = cuda.device_count = lambda: count
    c._cuda_isInBadFork = False
    c._cuda_getCurrentRawStream = lambda index: 0
    c._cuda_init = c._cuda_synchronize = lambda: None
    c._cuda_getDevice = lambda: ops.exchange_device(-1)
    c._cuda_setDevice = cuda._exchange_device = lambda index: ops.exchange_device(index)
    cuda._maybe_exchange_device = lambda index: ops.exchange_device(
        index
    )  # dynamo tells them apart
    cuda._cudart = True
    cuda.default_generators = tuple(map(ops.default_generator, range(count)))
    cuda._get_device_properties = lambda index: A100
    cuda.mem_get_info = lambda device=None: (78 * 2**30, 80 * 2**30)
    cuda.empty_cache = lambda: None
    cuda._lazy_init()
    dist.Backend.register_backend("stand_in", Nccl, devices=["cuda"])
    join = dist.init_process_group

    def start(backend, **options):
        Nccl.takes_host = "cpu:gloo" in backend  # tensors of the host then go to gloo
        join("stand_in" if "nccl" in backend else backend, **options)

    dist.init_process_group = start
    dist.Logger.set_runtime_stats_and_log = lambda logger: None  # it has timers for GPUs alone
    torch.compile = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)


class Nccl(dist.ProcessGroup):
    """Run collectives of the devices' tensors by gloo on the memory behind them."""

    takes_host = False

    def __init__(self, store, rank: int, size: int, timeout):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "stand_in"

    def allreduce(self, tensors, options):
        return self.gloo.allreduce(_host(tensors), options)

    def broadcast(self, tensors, options):
        return self.gloo.broadcast(_host(tensors), options)

    def allgather(self, everyone, mine, options):
        return self.gloo.allgather([_host(tensors) for tensors in everyone], _host(mine), options)


def _host(tensors: list) -> list:
    for x in tensors:
        if not (x.is_cuda or Nccl.takes_host):
            raise RuntimeError(f"No backend type associated with device type {x.device.type}")
    return [torch.ops.stand_in.on_host(x) if x.is_cuda else x for x in tensors]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    install()
    if os.environ.get("TRITON_INTERPRET") == "1":
        from triton_launch import check_launches

        check_launches()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
