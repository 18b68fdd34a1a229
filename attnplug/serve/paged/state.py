"""What the method that decodes keeps beside a layer's pages, and the memory that it has in the
server's budget."""

from typing import Any

import torch

from attnplug.errors import ServeError
from attnplug.policies import PagedPhase
from attnplug.serve.paged.pages import Pages


class LayerState:
    """A method's state of one layer's pages, by physical page.

    An engine may make a layer's cache twice, a small one to try CUDA graphs with and the real one:
    the state is made anew where the cache is another. Prefix hits find the state of the pages that
    they share, and a key that is written changes that of its page alone.
    """

    def __init__(self, phase: PagedPhase, basis: Any = None) -> None:
        self._phase, self.basis = phase, basis
        self._made: Any = None
        self._of: tuple[int, torch.Size] | None = None
        self._reserved: torch.Tensor | None = None

    def reserve(self, nbytes: int, device: torch.device) -> None:
        """Hold memory while the engine measures how much is left for its cache."""
        self._reserved = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def of(self, k: torch.Tensor) -> Any:
        """The state with the cache that `k [pages, Hkv, page, D]` is a view of."""
        place = k.data_ptr(), k.shape
        if place != self._of:
            if k.is_cuda and torch.cuda.is_current_stream_capturing():
                raise ServeError(
                    "attnplug: a CUDA graph captures a cache that no step has run on; start the "
                    "server without CUDA graphs and report this"
                )
            self._reserved = None
            self._made, self._of = self._phase.page_state(k, self.basis), place
        return self._made

    def update(self, k: torch.Tensor, slots: torch.Tensor) -> None:
        """Note that the keys at `slots` are written."""
        self._phase.note_pages(k, self.of(k), slots)

    def code(self, pages: Pages, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """`update` of a method that has a basis of the model: the tokens at `slots` have these
        `positions` in their sequences."""
        self._phase.code_pages(pages.k, pages.v, self.of(pages.k), slots, positions)


def share_of_cache(phase: PagedPhase, head_dim: int, dtype: torch.dtype) -> float:
    """The bytes of a page's state in those of its keys and values."""
    k = torch.empty((64, 1, 128, head_dim), dtype=dtype, device="meta")  # any pages
    return bytes_of(phase.page_state(k)) / (2 * k.nbytes)


def bytes_of(state: Any) -> int:
    """The bytes of a state: a tensor, several, or None."""
    if isinstance(state, tuple):
        return sum(map(bytes_of, state))
    return 0 if state is None else state.nbytes
