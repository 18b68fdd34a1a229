"""Notices what others write into a layer's keys and values.

A method keeps summaries or codes of the tokens beside them, and chooses by these. Whoever edits the
buffers in place (documents put together from stored caches, rotated keys, zeroed tokens) would
leave them stale, and nothing would show it. PyTorch counts in-place writes (`Tensor._version`), so
that a layer which remembers the counts of its own last write can tell that another one came.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from transformers.cache_utils import StaticLayer

from attnplug.models.sync import may_read

Versions = tuple[int, ...]
# Whether a method, and not dense, reads a cache of this many rows and slots on a device.
Serves = Callable[[int, int, torch.device], bool]


def _always(rows: int, slots: int, device: torch.device) -> bool:
    return True


class WatchedLayer(StaticLayer):
    """A static layer that looks at its tokens again where somebody else has written to `keys` or
    `values`, in place or by another tensor. `note_writes` follows each write of its own;
    `notice_edits` comes before the next.

    Neither replays of CUDA graphs nor tensors of `torch.inference_mode` are counted: after edits
    between two such steps, call `refresh`.
    """

    row_buffers: ClassVar[Any] = {}
    versions: Versions | None = None  # after this layer's own last write; None: not known
    serves: Serves = staticmethod(_always)  # else the layer's method leaves a cache to dense

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "versions": None}  # a copy has tensors of its own

    def note_writes(self) -> None:
        """What the buffers hold now, the layer knows."""
        if not torch.compiler.is_compiling():
            self.versions = self._versions()

    def notice_edits(self) -> None:
        """`refresh`, where the buffers have changed since `note_writes`."""
        if torch.compiler.is_compiling() or self.versions is None:
            return
        if self.versions != self._versions() and may_read(self.cumulative_length):
            self.refresh()

    def refresh(self) -> None:
        """Make anew all that is kept beside keys and values. Reads their number on the host."""
        self.versions = None
        self.flush()
        if self.is_initialized and self.row_buffers:
            self.renew()
        self.note_writes()

    def holds_more(self, rows: int, device: torch.device) -> bool:
        """Whether the layer, with `rows` rows on `device`, keeps more than keys and values, or
        other keys and values than the model hands it, that its method reads."""
        return self.serves(rows, self.max_cache_len, device)

    def flush(self) -> None:
        """Write the token that waits for its attention."""

    def renew(self) -> None:
        """Write all tokens once more. A subclass that has a cheaper way overrides it."""
        assert self.keys is not None and self.values is not None
        tokens = int(self.cumulative_length)
        keys, values = (buffer[:, :, :tokens].clone() for buffer in (self.keys, self.values))
        self.reset()
        self.update(keys, values)

    def _versions(self) -> Versions | None:
        keys, values = self.keys, self.values
        if not (self.row_buffers and self.is_initialized) or keys is None or values is None:
            return None
        if keys.is_inference() or values.is_inference():
            return None
        return keys.data_ptr(), keys._version, values.data_ptr(), values._version
