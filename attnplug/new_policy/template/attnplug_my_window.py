"""my_window: a decode method of attnplug, to be made your own.

It reads the last `window` keys of each row. Write your own `attend`; the tests say what still
holds."""

import dataclasses
from typing import ClassVar

import torch

from attnplug.ops import dense_decode
from attnplug.policies import AttentionCall, LayerShape, Phase, check_option


@dataclasses.dataclass(frozen=True)
class MyWindow(Phase):
    """Decode over the last `window` keys."""

    window: int = 1024

    name: ClassVar[str] = "my_window"
    phases: ClassVar[frozenset[str]] = frozenset({"decode"})

    def __post_init__(self) -> None:
        valid = isinstance(self.window, int) and self.window >= 1
        check_option(self.name, "window", self.window, valid, "an integer of at least 1")

    def note(self, shape: LayerShape) -> str:
        """What `attnplug.report` says of the layers that this method serves."""
        return f"reads at most {self.window:,} keys"

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The attention output `[B,Hq,1,D]` of a decode step."""
        out, _ = dense_decode(
            call.q, call.k, call.v, sinks=call.sinks, window=self.window, **call.options
        )
        return out
