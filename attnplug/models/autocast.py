"""The precision that torch.autocast asks for."""

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What torch.autocast has matrix products computed in here, or None outside of it."""
    if device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None
