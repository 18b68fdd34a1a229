"""The cache layer of keys and values in host memory, whatever a method keeps beside them."""

from typing import Any

import torch

from attnplug.models.buffers import prompt_on_gpu
from attnplug.models.cache import PlugLayer, Shape
from attnplug.models.host_memory import host_rows


class HostLayer(PlugLayer):
    """Keys and values in host memory, a token's next to each other, which kernels read and
    write over the link, where the method `serves` so many rows and slots. Smaller caches are on the
    GPU, as dense reads them whole.

    A base beside a method's own layer. A prefill of several chunks copies what came before back to
    the GPU, for one layer at a time.
    """

    on_host = False
    given: tuple[torch.Tensor, torch.Tensor] | None = None  # what `update` has returned last

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.on_host = self.serves(len(key_states), self.max_cache_len, key_states.device)
        if self.on_host:
            self._initialize(key_states, value_states, self._host)
        else:
            super().lazy_initialization(key_states, value_states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the tokens. For several queries on a GPU the keys and values come back in its own
        memory, as prefill methods read them many times: the new ones where there are no others."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        queries = key_states.shape[2]
        if self.on_host and queries > 1 and keys.is_cuda:
            keys, values = prompt_on_gpu(self, key_states, value_states)
        self.given = (keys, values) if queries > 1 else None
        return keys, values

    def note_buffers(self, key: torch.Tensor, value: torch.Tensor) -> None:
        given, self.given = self.given, None
        self.exposes_buffers = given is not None and key is given[0] and value is given[1]

    def reset(self) -> None:
        super().reset()
        self.given = None

    def _host(
        self, shapes: list[Shape], dtype: torch.dtype, device: torch.device
    ) -> list[torch.Tensor]:
        return host_rows(shapes, dtype, device, instead="keep keys and values on the GPU: kv='gpu'")

    def _rebind(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.on_host:
            shapes = [tuple(x.shape) for x in (keys, values)]
            there = self._host(shapes, keys.dtype, keys.device)
            keys, values = (x.copy_(y) for x, y in zip(there, (keys, values), strict=True))
        super()._rebind(keys, values)
