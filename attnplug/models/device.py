"""The device that a user names for a model."""

import torch

from attnplug.errors import ArgumentError


def default_device() -> str:
    """Where a model goes that no device is named for."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def read_device(device: str | torch.device) -> torch.device:
    """The device of that name. Raises ArgumentError where no model can be there."""
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(f"device is {device!r}, needs cpu or cuda") from error
    if found.type not in ("cpu", "cuda"):
        raise ArgumentError(f"device is {device!r}, needs cpu or cuda")
    there = torch.cuda.device_count()
    if found.type == "cuda" and (found.index or 0) >= there:
        seen = f"{there} GPU{'s' * (there > 1)}" if there else "no GPU"
        other = "cuda" if there else "cpu"
        raise ArgumentError(f"device is {device!r} but torch sees {seen} here; use {other}")
    return found
