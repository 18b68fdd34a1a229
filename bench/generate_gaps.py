"""Where a token of `generate` goes that its kernels do not take: the replay of the step's graph,
the gap to the next one, and what the host does meanwhile.

    cd bench; python3 generate_gaps.py dense 32768
    cd bench; python3 generate_gaps.py auto 32768

One policy a process, at the shape of test_generate.py. Prints one line of JSON, medians over the
tokens in microseconds: `replay` between events around a graph on the device, and `gap` from its
end to the next one's begin. On the host: `launch` of a graph and `between` two launches, of which
`due`, `ended` and `noted` are parts. A host that is late has a large `gap` and a small `ended`, in
which it waits for the device.
"""

import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from test_generate import HEAD, TAIL, filled, prompt, seconds_of, served, warm

from attnplug.models import captured, decode_loop
from attnplug.models.names import CACHE

TOKENS = 256


class Clock:
    """Events on the device and times on the host, of each replay and of what is between."""

    def __init__(self) -> None:
        self.device: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.launches: list[tuple[float, float]] = []
        self.host: dict[str, list[float]] = defaultdict(list)

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time on the host is noted."""

        def timed(*arguments: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            found = function(*arguments, **options)
            self.host[name].append(time.perf_counter() - begun)
            return found

        return timed

    def capture(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`captured.capture`, whose replays are noted."""

        def capture(*arguments: Any) -> captured.Replay:
            replay = original(*arguments)

            def noted() -> torch.Tensor | None:
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begun = time.perf_counter()
                first.record()
                found = replay()
                last.record()
                self.launches.append((begun, time.perf_counter()))
                self.device.append((first, last))
                return found

            return noted

        return capture

    def forget(self) -> None:
        for each in (self.device, self.launches, self.host):
            each.clear()

    def medians(self) -> dict[str, float]:
        """Microseconds of a token, of the steps behind the first ones of a call."""
        torch.cuda.synchronize()
        pairs = list(zip(self.device[HEAD:], self.device[HEAD + 1 :], strict=False))
        hosts = list(zip(self.launches[HEAD:], self.launches[HEAD + 1 :], strict=False))
        found = {
            "replay": [1e3 * first.elapsed_time(last) for (first, last), _ in pairs],
            "gap": [1e3 * last.elapsed_time(first) for (_, last), (first, _) in pairs],
            "launch": [1e6 * (end - begin) for (begin, end), _ in hosts],
            "between": [1e6 * (begin - end) for (_, end), (begin, _) in hosts],
        }
        found |= {name: [1e6 * each for each in times[HEAD:]] for name, times in self.host.items()}
        return {name: round(statistics.median(times), 1) for name, times in found.items()}


def gaps(policy: str, n: int) -> dict[str, float]:
    """`Clock.medians` of a call of generate behind a warm one, and its microseconds a token."""
    clock, ids = Clock(), prompt(n)
    captured.capture = clock.capture(captured.capture)
    decode_loop.due_layers = clock.around("due", decode_loop.due_layers)
    loop = decode_loop.Decoding
    loop._ended = clock.around("ended", loop._ended)
    loop._note_token = clock.around("noted", loop._note_token)
    with served(policy) as made:
        warm(made, policy, n, 1)
        for tokens in (HEAD, HEAD + TOKENS):
            clock.forget()
            cache = filled(policy, n - TAIL, 1)
            mask = torch.ones_like(ids)
            taken = seconds_of(made, ids, tokens, **{CACHE: cache}, attention_mask=mask)
            del cache
        return clock.medians() | {"call": round(1e6 * taken / tokens, 1)}


if __name__ == "__main__":
    chosen, length = sys.argv[1], int(sys.argv[2])
    print(json.dumps({"policy": chosen, "n": length} | gaps(chosen, length)))
