"""The summaries of a layer's pages, and the memory that they have in the server's budget."""

import torch

from attnplug.errors import ServeError
from attnplug.ops import page_bounds


class PageSummaries:
    """Max and min of the keys of each page, `[pages, Hkv, 2, D]`, by physical page.

    vLLM makes a layer's cache twice, a small one to try CUDA graphs with and the real one: the
    summaries are made anew where the cache is another. Prefix hits find the summaries of the pages
    that they share. A page that is used again is summarised again when it is full again.
    """

    def __init__(self) -> None:
        self.bounds: torch.Tensor | None = None
        self._of: tuple[int, torch.Size] | None = None
        self._reserved: torch.Tensor | None = None

    def reserve(self, nbytes: int, device: torch.device) -> None:
        """Hold memory while vLLM measures how much is left for its cache."""
        self._reserved = torch.empty(nbytes, dtype=torch.uint8, device=device)

    @property
    def reserved(self) -> bool:
        """Whether memory is held for summaries that are to come."""
        return self._reserved is not None

    def of(self, k: torch.Tensor) -> torch.Tensor:
        """The summaries of the cache that `k [pages, Hkv, page, D]` is a view of."""
        place = k.data_ptr(), k.shape
        if self.bounds is None or place != self._of:
            if k.is_cuda and torch.cuda.is_current_stream_capturing():
                raise ServeError(
                    "attnplug in vLLM: a CUDA graph captures a cache that no step has run on; "
                    "start the server with --enforce-eager and report this"
                )
            self._reserved = None
            pages, heads, _, width = k.shape
            self.bounds = torch.zeros((pages, heads, 2, width), dtype=k.dtype, device=k.device)
            self._of = place
        return self.bounds

    def update(self, k: torch.Tensor, slots: torch.Tensor) -> None:
        """Summarise the pages that the keys at `slots`, which are written, complete."""
        page_bounds(k, self.of(k), slots)


def share_of_cache(page: int, layers: int, all_layers: int) -> float:
    """How much of the memory for keys, values and summaries the summaries take, where `layers` of
    a model's layers have them: a page of keys and values is `page` times its summary."""
    part = layers / all_layers
    return part / (page + part)
