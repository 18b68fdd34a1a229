"""What a launcher needs to know of a device: its `Card`. Plans derive splits, tiles and stages from
it, and nothing else asks for a capability or for a vendor.

Launchers pass Triton's own options in a dict, `**{"num_warps": 4, **dependent}`: type checkers know
the kernel's parameters only.
"""

import functools
from typing import Any, NamedTuple

import torch

PLENTY = 1 << 30  # bytes of shared memory in Triton's interpreter, where nothing has to fit


class Card(NamedTuple):
    """What a device has. `made` derives the fields between `shared` and `bandwidth`."""

    vendor: str  # "nvidia" or "amd"; "" where Triton's interpreter runs the kernels
    capability: tuple[int, int]  # as torch gives it
    processors: int  # multiprocessors
    shared: int  # bytes of shared memory that a program may have
    pdl: bool = False  # starts a kernel early (programmatic dependent launch)
    asm: bool = False  # takes PTX inline, and a limit of the registers of a thread (maxnreg)
    mma: bool = False  # multiplies 16-bit tiles by mma.sync, and takes bfloat16
    wgmma: bool = False  # multiplies by warp groups: Hopper alone
    tmem: bool = False  # multiplies 64 rows and more in tensor memory: Blackwell's for data centres
    tma: bool = False  # copies tiles to shared memory by its tensor memory accelerator
    fp8: bool = False  # converts float8_e4m3fn
    ranges: bool = False  # its compiler asks which tensors are smaller than 2 GiB
    precision: str = "tf32x3"  # of float32 products that need more than TF32's bits
    bandwidth: float = 0.0  # bytes of its memory a second, at the most; 0 where that is not known

    @classmethod
    def made(
        cls,
        vendor: str,
        capability: tuple[int, int],
        processors: int,
        shared: int,
        bandwidth: float = 0.0,
    ) -> "Card":
        """The card of this vendor and capability. What ROCm calls capability 9.x is no Hopper."""
        nvidia = vendor == "nvidia"
        ninth = nvidia and capability >= (9, 0)
        return cls(
            vendor=vendor,
            capability=capability,
            processors=processors,
            shared=shared,
            pdl=ninth,
            asm=nvidia,
            mma=nvidia and capability >= (8, 0),
            wgmma=nvidia and capability == (9, 0),
            tmem=nvidia and capability[0] in (10, 11),
            tma=ninth,
            fp8=nvidia and capability >= (8, 9),
            ranges=vendor == "amd",
            precision="ieee" if vendor == "amd" else "tf32x3",
            bandwidth=bandwidth,
        )

    def limit(self, registers: int | None) -> dict[str, Any]:
        """The launch option that gives a thread at most so many registers, where there is one."""
        return {"maxnreg": registers} if self.asm and registers is not None else {}


INTERPRETED = Card.made("", (0, 0), 8, PLENTY)


@functools.cache
def card(device: torch.device) -> Card:
    """The card that a device is; `INTERPRETED` for what is not a GPU."""
    if device.type != "cuda":
        return INTERPRETED
    found = torch.cuda.get_device_properties(device)
    nvidia = torch.version.hip is None
    # ROCm's properties lack the second: its programs need not ask for all that there is.
    shared = found.shared_memory_per_block
    if nvidia:
        shared = found.shared_memory_per_block_optin
    capability, processors = (found.major, found.minor), found.multi_processor_count
    bandwidth = _bandwidth(found) if nvidia else 0.0  # AMD's HBM has no two transfers a clock
    return Card.made("nvidia" if nvidia else "amd", capability, processors, shared, bandwidth)


def _bandwidth(found: Any) -> float:
    """Bytes a second of a card's memory, by what torch says of it: two transfers a clock. 0 where
    torch or the driver does not say, or where the card shares the host's memory."""
    clock, bits = (getattr(found, f"memory_{name}", 0) for name in ("clock_rate", "bus_width"))
    is_shared = bool(getattr(found, "is_integrated", False))
    return 0.0 if is_shared else 2e3 * clock * bits / 8  # clocks are in kHz


def early(device: torch.device) -> tuple[bool, dict[str, bool]]:
    """Whether the device has PDL, and the launch option that starts a kernel before the one in
    front of it has ended. Such a kernel calls `gdc_wait` before it reads that one's results."""
    pdl = card(device).pdl
    return pdl, {"launch_pdl": True} if pdl else {}
