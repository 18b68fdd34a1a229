"""What a launcher asks of the device: multiprocessors, and programmatic dependent launch."""

import functools

import torch


@functools.cache
def machine(device: torch.device) -> tuple[int, bool]:
    """(multiprocessors, programmatic dependent launch); the interpreter gets 8 and False."""
    if device.type != "cuda":
        return 8, False
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major >= 9


def early(device: torch.device) -> tuple[bool, dict[str, bool]]:
    """Whether kernels can be launched early on the device, and the option that does."""
    pdl = machine(device)[1]
    return pdl, {"launch_pdl": True} if pdl else {}
