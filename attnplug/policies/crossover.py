"""Methods that leave short calls to dense attention, which is faster there."""

import torch

from attnplug.policies.base import Phase


class DenseBelow(Phase):
    """A method with an option `min_tokens`: calls of fewer tokens run dense; None is the crossover
    that was measured on the kind of device."""

    min_tokens: int | None

    def crossover(self, device: torch.device) -> int:
        """Tokens below which dense attention runs on such a device."""
        if self.min_tokens is not None:
            return self.min_tokens
        return self.measured_crossover("cpu" if device.type == "cpu" else "cuda")

    def measured_crossover(self, kind: str) -> int:
        """The crossover on a kind of device, "cpu" or "cuda", with these options."""
        raise NotImplementedError(f"{type(self).__name__} has no measured_crossover")

    def check_min_tokens(self) -> None:
        """Raise PolicyError unless `min_tokens` is None or a count."""
        tokens = self.min_tokens
        valid = tokens is None or (type(tokens) is int and tokens >= 0)
        self.check("min_tokens", valid, "None or an integer, at least 0")

    def dense_caches(self, device: torch.device) -> str:
        """Which caches a method with a cache layer of its own runs dense in, for its note."""
        tokens = self.crossover(device)
        small = f" below {tokens:,} tokens and in those" if tokens else ""
        return f"dense in caches{small} that attnplug did not make for it"
