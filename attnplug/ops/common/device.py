"""What a launcher needs to know of a device: how many multiprocessors it has, and whether it can
launch a kernel early (programmatic dependent launch, PDL).

Launchers pass Triton's own options in a dict, `**{"num_warps": 4, **dependent}`: type checkers know
the kernel's parameters only.
"""

import functools

import torch


@functools.cache
def machine(device: torch.device) -> tuple[int, bool]:
    """(multiprocessors, whether the device has PDL); 8 and False for Triton's interpreter."""
    if device.type != "cuda":
        return 8, False
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major >= 9


def early(device: torch.device) -> tuple[bool, dict[str, bool]]:
    """Whether the device has PDL, and the launch option that starts a kernel before the one in
    front of it has ended. Such a kernel calls `gdc_wait` before it reads that one's results."""
    pdl = machine(device)[1]
    return pdl, {"launch_pdl": True} if pdl else {}
