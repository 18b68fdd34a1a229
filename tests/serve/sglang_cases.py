"""A small engine around stand-ins, or around SGLang's own classes: requests with shared prefixes,
batches as SGLang's scheduler makes them, and CUDA graphs as its runners capture and replay them."""

from typing import Any

import sglang_stand_in
import torch

from attnplug.serve.paged.phases import read_policy
from attnplug.serve.sglang.backend import backend_class
from attnplug.serve.sglang.options import SGLANG

HEADS, KV_HEADS, WIDTH, LONGEST, LAYERS = 4, 2, 64, 512, 2
FP8 = torch.float8_e4m3fn
SCALES = (1.0, 0.03, 0.9)  # of queries, keys and values of a first layer in fp8; others have none


class Server:
    """A backend, its pools, and requests whose queries, keys and values are drawn by position, so
    that equal prefixes are equal pages. Request r has pool row r + 1. With a `cache` in fp8 all are
    numbers that it holds."""

    def __init__(
        self,
        policy: Any,
        page_size: int = 32,
        requests: int = 6,
        layers: int = LAYERS,
        kit: Any = sglang_stand_in,
        cache: torch.dtype = torch.float32,
        **changes,
    ):
        self.kit, self.cache = kit, cache
        self.page = page_size
        self.attentions = [
            kit.RadixAttention(HEADS, WIDTH, WIDTH**-0.5, KV_HEADS, i) for i in range(layers)
        ]
        for name, value in changes.pop("layer", {}).items():
            setattr(self.attentions[0], name, value)
        size = 40 * 64
        if cache == FP8:
            first = self.attentions[0]
            first.k_scale, first.v_scale = (
                torch.nn.Parameter(torch.tensor(x), requires_grad=False) for x in SCALES[1:]
            )
        pool = kit.token_pool(size, page_size, layers, KV_HEADS, WIDTH, cache)
        self.requests = kit.request_pool(requests, LONGEST)
        self.runner = kit.model_runner(
            self.attentions, pool, self.requests, page_size=page_size, context=LONGEST
        )
        self.policy = read_policy(policy, SGLANG)
        server = kit.server_args(**changes)
        made = backend_class(kit.FlashAttentionBackend)
        self.backend = made(self.runner, server, self.policy)
        order = torch.randperm(size // page_size, generator=torch.Generator().manual_seed(3))
        self.free = (order + 1).tolist()  # page 0 is nobody's
        self.pages: list[list[int]] = [[] for _ in range(requests)]
        self.seeds = [[100 + r] * LONGEST for r in range(requests)]  # what each token is
        self.seen = [0] * requests
        self.shapes = (layers, HEADS, KV_HEADS)

    def share(self, request: int, other: int, tokens: int) -> None:
        """A prefix hit: whole pages of another request, as the radix cache hands them out."""
        count = min(tokens, self.seen[other] - 1) // self.page
        self.pages[request] = self.pages[other][:count]
        tokens = count * self.page
        self.seeds[request][:tokens] = self.seeds[other][:tokens]
        self.seen[request] = tokens
        self._slots(request, 0, tokens)

    def leave(self, request: int) -> None:
        """A request ends, and its own pages are free for others."""
        held = {page for r, pages in enumerate(self.pages) if r != request for page in pages}
        self.free += [page for page in self.pages[request] if page not in held]
        self.pages[request], self.seen[request] = [], 0
        self.seeds[request] = [self.seeds[request][0] + 1000] * LONGEST
        self.requests.req_to_token[request + 1] = 0

    def draw(self, kind: int, layer: int, request: int, first: int, last: int) -> torch.Tensor:
        """Queries (0), keys (1) or values (2) of tokens `first` to `last - 1`."""
        heads, made = HEADS if kind == 0 else KV_HEADS, []
        for at in range(first, last):
            seed = ((self.seeds[request][at] * LONGEST + at) * 4 + kind) * 8 + layer
            draw = torch.Generator().manual_seed(seed)
            made.append(torch.randn(heads, WIDTH, generator=draw))
        drawn = torch.stack(made)
        if self.cache == FP8:
            scale = SCALES[kind] if layer == 0 else 1.0
            drawn = (drawn / scale).to(FP8).float() * scale
        return drawn

    def _slots(self, request: int, first: int, last: int) -> torch.Tensor:
        while len(self.pages[request]) * self.page < last:
            self.pages[request].append(self.free.pop(0))
        at = torch.arange(first, last)
        pages = torch.tensor(self.pages[request])
        slots = pages[at // self.page] * self.page + at % self.page
        self.requests.req_to_token[request + 1, first:last] = slots.int()
        return slots

    def batch(self, parts: list[tuple[int, int]], mode: str) -> Any:
        """The batch of so many new tokens of each request."""
        loc = [self._slots(r, self.seen[r], self.seen[r] + n) for r, n in parts]
        seen = [self.seen[r] + n for r, n in parts]
        fields = dict(
            forward_mode=self.kit.ForwardMode[mode],
            batch_size=len(parts),
            req_pool_indices=torch.tensor([r + 1 for r, _ in parts]),
            seq_lens=torch.tensor(seen),
            seq_lens_cpu=torch.tensor(seen),
            out_cache_loc=torch.cat(loc),
        )
        if mode != "DECODE":
            fields |= dict(
                extend_seq_lens=torch.tensor([n for _, n in parts]),
                extend_seq_lens_cpu=[n for _, n in parts],
                extend_prefix_lens_cpu=[self.seen[r] for r, _ in parts],
            )
        return self.kit.forward_batch(**fields)

    def inputs(self, parts: list[tuple[int, int]], layer: int) -> list[torch.Tensor]:
        return [
            torch.cat([self.draw(i, layer, r, self.seen[r], self.seen[r] + n) for r, n in parts])
            for i in range(3)
        ]

    def exact(self, parts: list[tuple[int, int]], layer: int, window: int = -1) -> torch.Tensor:
        """fp64 attention of the batch's rows."""
        made = []
        for r, n in parts:
            last = self.seen[r] + n
            q = self.draw(0, layer, r, self.seen[r], last).double().transpose(0, 1)[None]
            k, v = (self.draw(i, layer, r, 0, last).double().transpose(0, 1)[None] for i in (1, 2))
            at = torch.arange(self.seen[r], last)[:, None] - torch.arange(last)
            mask = (at >= 0) & ((window < 0) | (at <= window))
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, mask, scale=WIDTH**-0.5, enable_gqa=True
            )
            made.append(out[0].transpose(0, 1))
        return torch.cat(made).flatten(1)

    def run(self, parts: list[tuple[int, int]], mode: str = "", **given: Any) -> list[torch.Tensor]:
        """One batch through all layers, run eagerly; returns what each gave."""
        mode = mode or ("DECODE" if all(n == 1 for _, n in parts) else "EXTEND")
        batch = self.batch(parts, mode)
        self.backend.init_forward_metadata(batch)
        forward = self.backend.forward_decode if mode == "DECODE" else self.backend.forward_extend
        made = []
        for layer in self.attentions:
            q, k, v = self.inputs(parts, layer.layer_id)
            made.append(forward(q.flatten(1), k, v, layer, batch, **given))
        return made

    def done(self, parts: list[tuple[int, int]]) -> None:
        """The batch's tokens are there."""
        for r, n in parts:
            self.seen[r] += n

    def error(self, parts: list[tuple[int, int]], mode: str = "", **given: Any) -> torch.Tensor:
        """The largest error of each row's queries against fp64 attention, `[layers, rows]`; the
        batch's tokens are there then."""
        made = self.run(parts, mode, **given)
        errors = []
        for layer, out in zip(self.attentions, made, strict=True):
            want = self.exact(parts, layer.layer_id, layer.sliding_window_size)
            worst = (out - want).abs().amax(1).split([n for _, n in parts])
            errors.append(torch.stack([each.max() for each in worst]))
        self.done(parts)
        return torch.stack(errors)


class Graph:
    """A CUDA graph of steps of so many rows, as SGLang's runner has it. Nothing is recorded on a
    CPU: a replay runs what was captured again, on the buffers that were captured."""

    def __init__(self, server: Server, rows: int):
        self.server, backend = server, server.backend
        fill = backend.get_cuda_graph_seq_len_fill_value()
        kit = server.kit
        self.batch = kit.forward_batch(
            forward_mode=kit.ForwardMode.DECODE,
            batch_size=rows,
            req_pool_indices=torch.zeros(rows, dtype=torch.int64),
            seq_lens=torch.full((rows,), fill),
            out_cache_loc=torch.zeros(rows, dtype=torch.int64),
            seq_lens_cpu=torch.full((rows,), fill),
        )
        self.fill = fill
        layers = server.shapes[0]
        self.q = torch.randn(layers, rows, HEADS * WIDTH)
        self.k, self.v = torch.randn(2, layers, rows, KV_HEADS, WIDTH)
        backend.init_forward_metadata_out_graph(self.batch, in_capture=True)
        for _ in range(3):  # two to warm up, and the capture
            self.outputs = self._body()

    def _body(self) -> list[torch.Tensor]:
        backend, made = self.server.backend, []
        backend.init_forward_metadata_in_graph(self.batch)
        for layer in self.server.attentions:
            i = layer.layer_id
            made.append(backend.forward_decode(self.q[i], self.k[i], self.v[i], layer, self.batch))
        return made

    def replay(self, requests: list[int]) -> torch.Tensor:
        """A step of these requests, padded to the graph's rows; their errors, `[layers, rows]`."""
        server, parts = self.server, [(r, 1) for r in requests]
        live, count = server.batch(parts, "DECODE"), len(requests)
        static = self.batch
        static.req_pool_indices.zero_()[:count] = live.req_pool_indices
        static.seq_lens.fill_(self.fill)[:count] = live.seq_lens
        static.out_cache_loc.zero_()[:count] = live.out_cache_loc
        for layer in range(server.shapes[0]):
            inputs = server.inputs(parts, layer)
            for buffer, new in zip((self.q, self.k, self.v), inputs, strict=True):
                buffer[layer, :count] = new.view(count, *buffer.shape[2:])
        view = server.kit.forward_batch(
            forward_mode=server.kit.ForwardMode.DECODE,
            batch_size=static.batch_size,
            req_pool_indices=static.req_pool_indices,
            seq_lens=static.seq_lens,
            out_cache_loc=live.out_cache_loc,  # not padded
        )
        server.backend.init_forward_metadata_out_graph(view)
        made = self._body()
        errors = [
            (out[:count] - server.exact(parts, i)).abs().amax(1) for i, out in enumerate(made)
        ]
        server.done(parts)
        return torch.stack(errors)
