"""Lists the GPUs to plan with. Nothing here needs torch."""

from typing import NamedTuple

# The share of a GPU's peak that a run is assumed to reach. Published runs of GPT-2 124M (bf16,
# flash attention, torch.compile) reach 0.45 to 0.55, the paper's eager LSSAR about a tenth.
UTILISATION = 0.4


class Gpu(NamedTuple):
    key: str
    name: str  # a part of what the driver calls it
    flops: float  # peak of dense bf16 products with fp32 sums: the vendors' data sheets
    memory: float  # GiB: what torch reports, less half a GiB for its own context


# Where one name is a part of another, the longer comes first.
GPUS = {
    gpu.key: gpu
    for gpu in (
        Gpu("h200", "H200", 989e12, 139.3),
        Gpu("h100-pcie", "H100 PCIe", 756e12, 78.6),
        Gpu("h100", "H100", 989e12, 78.6),
        Gpu("a100-40", "A100-SXM4-40GB", 312e12, 38.9),
        Gpu("a100", "A100", 312e12, 78.6),
        Gpu("l40s", "L40S", 362e12, 43.9),
        Gpu("a10g", "A10G", 70e12, 21.5),
        Gpu("5090", "RTX 5090", 210e12, 30.8),
        Gpu("4090", "RTX 4090", 165e12, 23.0),
        Gpu("3090", "RTX 3090", 71e12, 23.0),
    )
}


def gpu_hours(flops: float, gpu: str = "a100") -> float:
    """Return the hours of one GPU for this many FLOPs at UTILISATION of its peak."""
    return flops / (UTILISATION * GPUS[gpu].flops) / 3600


def gpu_called(name: str) -> str | None:
    """Return the key of a GPU by what the driver calls it, None if it is not in the table."""
    return next((gpu.key for gpu in GPUS.values() if gpu.name in name), None)
