"""What a method is that decodes from pages, as engines and continuous batching have them."""

from typing import Any, ClassVar

import torch

from attnplug.call import PagedCall
from attnplug.policies.base import Phase

OWN_ROWS = "needs rows of a cache of its own"  # a reason why a method cannot decode from pages


class PagedPhase(Phase):
    """A decode method that also reads a paged cache `k, v [pages,Hkv,page,D]`, whose rows are
    sequences of pages in any order that several rows may share.

    `attend_pages` is all that continuous batching calls. A method that keeps something of the keys
    has `page_state` and is told of what is written. What an engine calls for rows that another
    method shares a step with, from `attend_far` on, is there for methods that serve in vLLM.
    """

    notes_in_step: ClassVar[bool] = False  # `begin_far` notes the keys at a call's slots
    # The most rows of a served step that `attend_rows` takes, without another method for near rows.
    rows_whole: ClassVar[int] = 0
    has_model_basis: ClassVar[bool] = False  # over pages it codes keys in a basis of the model

    def pages_refusal(self) -> str | None:
        """Why this method cannot decode from pages with its options, so that `dense` does, or
        None."""
        return None

    def for_requests(self, longest: int) -> "PagedPhase":
        """This method over an engine's pages, whose requests have up to `longest` tokens."""
        return self

    def page_state(self, k: torch.Tensor, basis: Any = None) -> Any:
        """What this method keeps beside one layer's pages `k [pages,Hkv,page,D]`, or None. `basis`
        is the layer's, where the method has one of the model (`has_model_basis`). Called before
        anything is written to the pages."""
        return None

    def pages_note(self, device: torch.device) -> str:
        """For `report`: which rows of steps over pages dense serves, decided on the device."""
        return ""

    def page_share(self, itemsize: int) -> float:
        """The bytes of `page_state`, as a share of the bytes of keys and values, of `itemsize`
        bytes a number: the largest share that a layer's shape can give."""
        return 0.0

    def note_pages(self, k: torch.Tensor, state: Any, slots: torch.Tensor) -> None:
        """Called after keys were written or copied to the `slots` `[N]` of one layer's pages: page
        times its size, plus the place in it, or -1 for a row that only pads the batch. Not of a
        method that has a basis of the model."""

    def code_pages(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        state: Any,
        slots: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """`note_pages` of a method that has a basis of the model: it is also told the values, and
        which `positions` `[N]` the tokens have in their sequences."""
        raise NotImplementedError(f"{type(self).__name__} has no code_pages")

    def attend_pages(self, call: PagedCall) -> torch.Tensor:
        """The attention output `[R,Hq,1,D]` of a decode step over pages."""
        raise NotImplementedError(f"{type(self).__name__} has no attend_pages")

    def attend_far(self, call: PagedCall) -> torch.Tensor:
        """The same by the method itself for rows of any length, where another decides which rows
        are far: the others come with a length of 0, and what they give is not looked at."""
        raise NotImplementedError(f"{type(self).__name__} has no attend_far")

    def begin_far(self, call: PagedCall) -> Any:
        """The first half of `attend_far`, for what another method may run beside: what `end_far`
        needs."""
        return self.attend_far(call)

    def end_far(
        self,
        found: Any,
        call: PagedCall,
        far: torch.Tensor,
        out: torch.Tensor,
        *,
        chained: bool = True,
    ) -> None:
        """The second half: write the output of the rows that are `far`, bool `[R]`, into `out`
        `[R,Hq,1,D]`, in which another method has written the others'. `chained` says that the
        kernel in front is the last one of `begin_far`."""
        torch.where(far[:, None, None, None], found, out, out=out)

    def attend_rows(self, call: PagedCall, near: torch.Tensor, out: torch.Tensor) -> None:
        """The step of all rows, into `out` `[R,Hq,1,D]`. This method serves far rows. Those with a
        length of 0 in the call are read whole, over their `near` keys, `[R]`."""
        raise NotImplementedError(f"{type(self).__name__} has no attend_rows")


def why_no_pages(method: Phase) -> str | None:
    """Why a method cannot decode from pages, or None."""
    paged = isinstance(method, PagedPhase)
    return method.pages_refusal() if paged else OWN_ROWS
