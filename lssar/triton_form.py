"""What a Triton kernel is compiled for. Nothing here needs Triton."""

from dataclasses import dataclass

from lssar.fused import COSINE, L1, LOG_N, PHI, RECENTRE_L1, Settings
from lssar.mechanisms import SIGNED

MAX_INTEGER_P = 64  # integers up to here are multiplied out, one compiled kernel each


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for, besides its tiles."""

    phi: str
    power: int | None = None  # None: not sharpened; 0: a real p, or one for each row
    cosine: bool = False
    l1: bool = True
    recentre: bool = False  # subtract the mean and normalise again
    bias: bool = False
    log_n: bool = False  # the bias is a multiple of log N
    spans: bool = False
    sums: bool = False  # dq computes D and E alone, for a second launch to take

    @property
    def sharp(self) -> bool:
        return self.power is not None

    @property
    def centred(self) -> bool:
        """The row's mean is subtracted, and the backward has a term for it."""
        return self.sharp or self.recentre

    @property
    def signed(self) -> bool:
        return self.recentre or self.phi in SIGNED

    @property
    def online(self) -> bool:
        """exp relative to the largest score so far."""
        return self.phi == "exp" and self.l1 and not self.centred

    @property
    def biased(self) -> bool:
        return (self.bias or self.log_n) and not (self.phi == "exp" and self.l1)

    @property
    def shifted(self) -> bool:
        """The backward adds something to a row's scores."""
        return self.biased or (self.phi == "exp" and self.l1)


def form_of(s: Settings, keys: int, spans: bool) -> Form:
    power = None
    if s.p:
        adaptive = s.alpha != 0 and keys > s.train_length
        whole = not adaptive and s.p == int(s.p) and s.p <= MAX_INTEGER_P
        power = int(s.p) if whole else 0
    return Form(
        phi=PHI[s.phi],
        power=power,
        cosine=bool(s.flags & COSINE),
        l1=bool(s.flags & L1),
        recentre=bool(s.flags & RECENTRE_L1),
        bias=s.bias != 0,
        log_n=bool(s.flags & LOG_N),
        spans=spans,
    )
