"""What the host will read of the device, without waiting for what comes after it."""

from dataclasses import dataclass
from typing import Any, Self

import torch


@dataclass
class Look:
    """A tensor as it is now, on its way to the host."""

    value: torch.Tensor
    ready: Any

    @classmethod
    def at(cls, tensor: torch.Tensor) -> Self:
        if not tensor.is_cuda:
            return cls(tensor.clone(), None)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
        host.copy_(tensor, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return cls(host, ready)

    def read(self) -> Any:
        """Its numbers, as `tolist` gives them."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.value.tolist()
