"""The summaries of a layer's pages, and the memory that they have in the server's budget."""

import torch

from attnplug.errors import ServeError
from attnplug.ops import page_bounds
from attnplug.ops.gather.page_bounds import empty_page_bounds
from attnplug.policies import Gather


class PageSummaries:
    """Summaries of all pages of one layer's cache, by physical page.

    vLLM makes a layer's cache twice, a small one to try CUDA graphs with and the real one: the
    summaries are made anew where the cache is another. Prefix hits find the summaries of the pages
    that they share. A page that is used again is summarised again when it is full again.
    """

    def __init__(self, phase: Gather) -> None:
        self._phase = phase
        self._bounds: torch.Tensor | None = None
        self._of: tuple[int, torch.Size] | None = None
        self._reserved: torch.Tensor | None = None

    def reserve(self, nbytes: int, device: torch.device) -> None:
        """Hold memory while vLLM measures how much is left for its cache."""
        self._reserved = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def of(self, k: torch.Tensor) -> torch.Tensor:
        """The summaries of the cache that `k [pages, Hkv, page, D]` is a view of."""
        place = k.data_ptr(), k.shape
        if self._bounds is None or place != self._of:
            if k.is_cuda and torch.cuda.is_current_stream_capturing():
                raise ServeError(
                    "attnplug in vLLM: a CUDA graph captures a cache that no step has run on; "
                    "start the server with --enforce-eager and report this"
                )
            self._reserved = None
            self._bounds, self._of = empty_summaries(k, self._phase), place
        return self._bounds

    def update(self, k: torch.Tensor, slots: torch.Tensor) -> None:
        """Summarise the blocks that the keys at `slots`, which are written, complete."""
        page_bounds(k, self.of(k), slots, block=self._phase.block)


def empty_summaries(k: torch.Tensor, phase: Gather) -> torch.Tensor:
    """Summaries of fresh pages `k [pages, Hkv, page, D]`, in the form that the method reads. INT8
    codes are none: they refer to a sequence's first block, and pages belong to no sequence."""
    coded = phase.scoring == "spread"
    parts = 1 if phase.scoring == "mean" else 2
    return empty_page_bounds(k, phase.block, parts, dtype=torch.uint8 if coded else None)


def share_of_cache(phase: Gather, head_dim: int, dtype: torch.dtype) -> float:
    """The bytes of a page's summary in those of its keys and values."""
    k = torch.empty((64, 1, 128, head_dim), dtype=dtype, device="meta")  # any pages
    return empty_summaries(k, phase).nbytes / (2 * k.nbytes)
