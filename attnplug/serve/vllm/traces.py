"""The traces of a server's prompts: a file each, while there is room for more.

A file is begun when a prompt's first chunk is computed, and complete before the prompt's first new
token is. It holds what `attnplug.trace.record` writes of a prefill in transformers, a step a chunk.
Nothing here knows the engine: `Requests` says which rows of a batch are whose.
"""

import dataclasses
import fcntl
import logging
import os
import re
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from attnplug import files
from attnplug.call import AttentionCall, Edges
from attnplug.errors import ServeError, TraceFileError
from attnplug.serve.paged.rows import Batch, Row
from attnplug.serve.vllm.options import TraceOptions
from attnplug.trace.record import Recording

logger = logging.getLogger("vllm.attnplug")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Prompt:
    """A request's prompt: its token ids, its number on this server, the name that its request gave
    it, and how far it has come."""

    def __init__(self, ids: list[int], number: int, name: str = ""):
        self.ids, self.number, self.name = ids, number, name
        self.recording: Recording | None = None
        self.cached = 0  # tokens that the engine had in its cache
        self.computed = 0  # tokens that it has computed, or had there
        self.closed = False  # nothing more is recorded of it

    def __str__(self) -> str:
        name = f" ({self.name})" if self.name else ""
        return f"prompt {self.number}{name}, {len(self.ids):,} tokens"


@dataclasses.dataclass(frozen=True)
class Traced:
    """A row of a batch that is recorded."""

    row: Row
    prompt: Prompt
    traces: "Traces"

    @property
    def recorded(self) -> bool:
        """Whether its recording goes on."""
        return self.prompt.recording is not None

    def emit(self, layer: int, call: AttentionCall, edges: Edges | None) -> None:
        """Take the edges of one layer, None where there are none; the last layer of a prompt's last
        chunk completes the file."""
        last = self.row.seen >= len(self.prompt.ids)
        self.traces.emit(self.prompt, layer, call, edges, last=last)


class Traces:
    """The files that a process writes. `about` is what each says of its origin, `label` tells apart
    the processes of a server that share the folder."""

    def __init__(
        self,
        options: TraceOptions,
        about: dict[str, Any],
        *,
        label: str = "",
        tokenizer: Any = None,
    ):
        self.options, self.about, self.label, self.tokenizer = options, about, label, tokenizer
        self.layers: set[int] = set()  # those that are traced, known before the first prompt
        self.open: list[Prompt] = []
        self.folder = files.located(options.folder)
        weakref.finalize(self, os.close, self._claim())
        numbers = [re.match(r"prompt-(\d+)", path.name) for path in self.folder.iterdir()]
        self.numbered = max((int(found[1]) for found in numbers if found), default=0)
        held = re.compile(rf"prompt-[^@]*{label}\.parquet")
        # What a server before was killed over in the midst of a prompt, an older attnplug's too.
        files.delete_left(self.folder, rf"{held.pattern}(?:{files.PART}|\.part)")
        sizes = [x.stat().st_size for x in self.folder.iterdir() if held.fullmatch(x.name)]
        self.files, self.nbytes = len(sizes), sum(sizes)
        self.full = ""  # why nothing more is recorded
        self._has_room()

    def _claim(self) -> int:
        """Make the folder, and keep other servers out of it until this file is closed."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder / f".lock{self.label}", os.O_CREAT | os.O_WRONLY, 0o644)
        except OSError as error:
            raise ServeError(
                f"attnplug in vLLM: traces cannot go to {self.folder} ({error}); name another "
                "folder (traces: folder)"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise ServeError(
                f"attnplug in vLLM: another server writes traces to {self.folder}; give this one "
                "a folder of its own (traces: folder)"
            ) from error
        return lock

    def prompt(self, ids: list[int], asked: bool | str) -> Prompt | None:
        """A new request's prompt, None where it is not to be recorded. `asked` is what its request
        says: a name, whether, or what the options say."""
        if asked is False or self.full:
            return None
        self.numbered += 1
        return Prompt(ids, self.numbered, asked if isinstance(asked, str) else "")

    def rows(self, batch: Batch, prompts: Mapping[int, Prompt]) -> tuple[Traced, ...]:
        """The rows to record of a batch whose row i is `prompts[i]`'s. Called once a batch."""
        # A request's first chunk has its place behind the steps, also where it is of one token.
        alone = [(row.index, row.seen) for row in batch.prompts if row.queries == 1]
        for index, seen in (*enumerate(batch.step_keys), *alone):
            if index in prompts:
                self._pass(prompts[index], seen)
        rows = [row for row in batch.prompts if row.index in prompts and row.queries > 1]
        return tuple(
            Traced(row, prompts[row.index], self)
            for row in rows
            if self._advance(prompts[row.index], row)
        )

    def emit(
        self,
        prompt: Prompt,
        layer: int,
        call: AttentionCall,
        edges: Edges | None,
        *,
        last: bool,
    ) -> None:
        """Take the edges of one layer of a prompt's chunk, the `last` one or not."""
        assert prompt.recording is not None  # the caller has looked
        try:
            prompt.recording.emit(layer, call, edges)
            if self._bytes_in_use() > self.options.megabytes * 1e6:
                self._stop(f"more than {self.options.megabytes:g} megabytes")
            elif last and layer == max(self.layers):
                self._finish(prompt)
        except TraceFileError as error:  # a full disk must not end a server
            self._stop(str(error))

    def drop(self, prompt: Prompt, why: str) -> None:
        """Leave no file of a prompt whose recording goes on."""
        if prompt.recording is not None:
            prompt.recording.discard()
            prompt.recording = None
            self.open.remove(prompt)
            self.files -= 1
            logger.info("attnplug: no trace of %s: %s", prompt, why)

    def _pass(self, prompt: Prompt, seen: int) -> None:
        """A row of one query is not recorded: its attention may run in a CUDA graph."""
        self._go_on(prompt, seen - 1, seen)
        if prompt.closed or seen < len(prompt.ids):
            return
        if prompt.recording is not None:
            self._finish(prompt)
        else:
            prompt.closed = True
            why = "they were in the prefix cache, or came one at a time"
            logger.info("attnplug: no trace of %s: %s", prompt, why)

    def _advance(self, prompt: Prompt, row: Row) -> bool:
        """Whether to record the next chunk of a prompt."""
        self._go_on(prompt, row.seen - row.queries, row.seen)
        if prompt.recording is None and not prompt.closed:
            self._begin(prompt)
        return prompt.recording is not None

    def _go_on(self, prompt: Prompt, first: int, last: int) -> None:
        """The engine computes a prompt's tokens `first` to `last - 1`: those behind what it has
        computed, or it begins, behind what its cache has."""
        if first != prompt.computed:
            self.drop(prompt, "vLLM computes it anew")
            prompt.cached = first
        prompt.computed = last

    def _begin(self, prompt: Prompt) -> None:
        if not self._has_room():
            prompt.closed = True
            return
        name = f"-{prompt.name}" if prompt.name else ""
        path = self.folder / f"prompt-{prompt.number:04}{name}{self.label}.parquet"
        own = {"request": prompt.name, "prompt_tokens": len(prompt.ids)}
        own["cached_tokens"] = prompt.cached
        try:
            tokens = [np.asarray(prompt.ids, np.int32)]
            prompt.recording = Recording(path, self.about | own, tokens=tokens)
        except TraceFileError as error:
            prompt.closed = True
            self._stop(str(error))
            return
        self.open.append(prompt)
        self.files += 1

    def _finish(self, prompt: Prompt) -> None:
        recording = prompt.recording
        assert recording is not None  # it goes on
        prompt.closed = True
        if recording.empty:
            self.drop(prompt, "the method that is followed read every block")
            return
        try:
            recording.finish(self.tokenizer)
            self.nbytes += recording.path.stat().st_size
        except TraceFileError as error:
            self._stop(str(error))
            return
        prompt.recording = None
        self.open.remove(prompt)
        cached = f" Its first {prompt.cached:,} were in the prefix cache." if prompt.cached else ""
        logger.info("attnplug: the trace of %s is %s.%s", prompt, recording.path, cached)
        self._has_room()

    def _bytes_in_use(self) -> int:
        going_on = [prompt.recording for prompt in self.open]
        return self.nbytes + sum(each.nbytes for each in going_on if each is not None)

    def _has_room(self) -> bool:
        """Whether one file more may be begun; if there will be no room again, say so."""
        if self.full:
            return False
        if self.nbytes >= self.options.megabytes * 1e6:
            self._stop(f"it holds {self.nbytes / 1e6:.0f} megabytes")
        elif self.files >= self.options.files and not self.open:
            self._stop(f"it holds {self.files} files")
        return not self.full and self.files < self.options.files

    def _stop(self, why: str) -> None:
        """Record nothing more, and leave no file of what goes on."""
        self.full = why
        logger.warning(
            "attnplug: no more prompts are traced to %s: %s. Empty the folder, or raise traces: "
            "files or megabytes, and start the server again",
            self.folder,
            why,
        )
        for prompt in list(self.open):
            self.drop(prompt, why)
