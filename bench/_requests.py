"""What a server's day brings, request by request: the kinds, how each is asked for, and what its
answer is held to. `soak.py --requests` runs it."""

import contextlib
import functools
import gc
import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import StoppingCriteria
from transformers.generation.configuration_utils import CompileConfig
from transformers.generation.streamers import BaseStreamer
from triton import knobs

import attnplug
from attnplug import files
from attnplug.testing.policy import PAD, VOCABULARY, tiny_model

# Two policies, each on a model of its own, and the tokens up to which each is exact. They change
# places in the middle of the soak.
POLICIES = {
    "momo+gather": (
        "momo(gamma=8, block=128, query_block=128, top_k=64, exact_k=64, min_tokens=0)"
        "+gather(k=256, block=128, local=2, min_tokens=0)",
        64 * 128,
    ),
    "certified": (
        "certified(block=64, coverage=1.0, k_min=1024, k_max=1024, v_tol=0.0, tolerance=0.0, "
        "min_tokens=0)",
        1 << 40,
    ),
}
SAMPLERS: list[dict[str, Any]] = [
    {"top_k": 5},
    {"top_p": 0.9},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.8},
]
SHORTEST, ROWS, NEW = 100, 8, 16
TOKENS = 1  # times the longest prompt: what a batch of rows may have
COMPARED = 50  # one request in 50 is compared with stock
SETTLED, TOLD = 100, 20  # so often is the memory looked at, and are the counts written
SCORES = 1 << 30  # of a batch: what more than one process may store at once on a GPU
CHUNK = 512  # queries of a prompt that would have more
TIE = {False: 1e-4, True: 5e-2}  # of the largest logit; under autocast
FAULTS = 10  # are told, and all are counted
ADAPTERS = ("legal", "medical", "late")  # the last comes in the middle of the soak
SLACK = 1 << 20  # bytes that a flat memory may rise by, beside a hundredth


class Lora(nn.Module):
    """A linear layer with low-rank adapters, of which one or none is active, as peft makes it. It
    is written here since a GPU machine may lack peft."""

    def __init__(self, base_layer: nn.Linear):
        super().__init__()
        self.base_layer, self.active = base_layer, ""
        self.down, self.up = nn.ModuleDict(), nn.ModuleDict()

    def add(self, name: str, seed: int, rank: int = 4) -> None:
        base, random = self.base_layer, torch.Generator().manual_seed(seed)
        sizes = (rank, base.in_features), (base.out_features, rank)
        for part, size in zip((self.down, self.up), sizes, strict=True):
            layer = nn.Linear(size[1], size[0], bias=False)
            layer.weight.data.copy_(torch.randn(size, generator=random) / math.sqrt(size[1]))
            part[name] = layer.to(base.weight).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.base_layer(x)
        if self.active:
            found = found + self.up[self.active](self.down[self.active](x))
        return found


def with_adapters(model: Any) -> Any:
    """Query and value projections that take adapters."""
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Lora(getattr(layer.self_attn, name)))
    return model


def _loras(model: Any) -> list[Lora]:
    return [each for each in model.modules() if isinstance(each, Lora)]


def add_adapter(model: Any, name: str) -> None:
    for index, each in enumerate(_loras(model)):
        each.add(name, 100 * ADAPTERS.index(name) + index)


@dataclass(frozen=True)
class Request:
    number: int
    model: int
    rows: int
    tokens: int
    new: int
    padded: int  # of the first row
    sampler: dict[str, Any] | None
    stream: bool
    cancel: int  # the number of tokens after which the client cancels; 0: it does not
    adapter: str
    ends: tuple[int, ...]
    autocast: bool
    inference: bool
    hook: bool
    compared: bool

    def kinds(self) -> Iterator[str]:
        decade = 10 ** int(math.log10(self.tokens))
        yield f"rows {self.rows}"
        yield f"tokens {decade:,} to {10 * decade:,}"
        names = ("padded", "stream", "autocast", "hook", "compared")
        yield from (name for name in names if getattr(self, name))
        yield "sampled" if self.sampler else "greedy"
        yield "inference mode" if self.inference else "no grad"
        yield f"adapter {self.adapter or 'none'}"
        if self.ends:
            yield "own end tokens"
        if self.cancel:
            yield "cancelled in its stream" if self.stream else "cancelled by a criterion"


def draw(
    number: int,
    seed: int,
    longest: int,
    adapters: tuple[str, ...],
    *,
    compared: bool = False,
) -> Request:
    """The request of a number: always the same."""
    rng = random.Random(f"{seed} {number}")
    model = rng.randrange(2)
    short = math.log(min(SHORTEST, longest))
    # Most prompts are short: one of eight has more than two thirds of the decades.
    tokens = int(math.exp(short + (math.log(longest) - short) * rng.random() ** 3))
    rows = min(rng.randint(1, ROWS), max(1, TOKENS * longest // tokens))
    stream = rng.random() < 0.3
    rows, new = 1 if stream else rows, rng.randint(2, NEW)  # a streamer takes one row
    few = rows * tokens**2 <= SCORES  # padding makes transformers write masks
    padded = rng.randrange(1, tokens // 2) if few and rows > 1 and rng.random() < 0.5 else 0
    sampled, cancelled = rng.random() < 0.4, rng.random() < (0.4 if stream else 0.1)
    return Request(
        number,
        model,
        rows,
        tokens,
        new,
        padded,
        rng.choice(SAMPLERS) if sampled and not compared else None,
        stream,
        rng.randrange(1, new) if cancelled and not compared else 0,
        rng.choice(("", "", *adapters)),
        tuple(rng.sample(range(2, VOCABULARY), 8)) if rng.random() < 0.3 else (),
        rng.random() < 0.2,
        rng.random() < 0.5,
        rng.random() < 0.1,
        compared,
    )


class Cancelled(Exception):
    """The client has gone."""


class Stream(BaseStreamer):
    """Keeps the tokens; is closed after so many, 0 never."""

    def __init__(self, after: int):
        self.after, self.tokens, self.ended = after, list[int](), False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.reshape(-1).tolist()
        if self.after and len(self.tokens) - self.prompt >= self.after:
            raise Cancelled

    def end(self) -> None:
        self.ended = True

    prompt = 0


class After(StoppingCriteria):
    """Ends all rows at a length."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        done = input_ids.shape[1] >= self.length
        return torch.full((len(input_ids),), done, device=input_ids.device)


class Requests:
    """Two models of the same weights with a policy each, and stock. `compiled` has the second
    compile its steps, on a GPU, where a step of these models would else be captured as it is."""

    def __init__(
        self,
        device: str,
        longest: int,
        seed: int,
        *,
        halfway: int,
        compiled: bool = False,
        out: Path | None = None,
    ):
        self.device, self.longest, self.seed = device, longest, seed
        self.halfway, self.out = halfway, out
        make = functools.partial(tiny_model, device=device, max_position_embeddings=2 * longest)
        self.stock, *self.models = (with_adapters(make()) for _ in range(3))
        self.adapters: tuple[str, ...] = ()
        for name in ADAPTERS[:-1]:
            self.add_adapter(name)
        self.compiled = compiled and device == "cuda"
        if self.compiled:
            self.models[1].generation_config.compile_config = CompileConfig()
        self.policies = list(POLICIES)
        for model, name in zip(self.models, self.policies, strict=True):
            attnplug.apply(model, POLICIES[name][0])
        self.counts, self.memory, self.host = Counter[str](), list[int](), list[int]()
        self.kernels, self.loaded = list[int](), 0
        knobs.runtime.jit_post_compile_hook = self._count_kernel
        self.faults: list[str] = []
        self.begun = time.monotonic()

    def add_adapter(self, name: str) -> None:
        for model in (self.stock, *self.models):
            add_adapter(model, name)
        self.adapters += (name,)

    def change(self) -> None:
        """In the middle of the soak: the policies change places, and an adapter comes."""
        for model in self.models:
            attnplug.remove(model)
        self.policies.reverse()
        for model, name in zip(self.models, self.policies, strict=True):
            attnplug.apply(model, POLICIES[name][0])
        self.add_adapter(ADAPTERS[-1])
        self.counts["changes of policies"] += 1

    def run(self, numbers: range, seconds: float) -> None:
        """All requests of these numbers that the time allows."""
        try:
            for index, number in enumerate(numbers):
                if time.monotonic() - self.begun > seconds:
                    break
                if number >= self.halfway and ADAPTERS[-1] not in self.adapters:
                    self.change()
                compared = index % COMPARED == 0
                drawn = draw(number, self.seed, self.longest, self.adapters, compared=compared)
                self.serve(drawn)
                if self.counts["answered"] % SETTLED == 0:
                    self.settle()
                elif self.counts["answered"] % TOLD == 0:
                    self.write()
            self.settle()
        finally:  # a request that raised has begun and was not answered
            self.write()

    def serve(self, request: Request) -> None:
        self.counts["begun"] += 1
        longest = POLICIES[self.policies[request.model]][1] - 2 * NEW
        if request.compared and request.tokens > longest:
            values = vars(request) | {
                "tokens": longest,
                "padded": min(request.padded, longest // 2),
            }
            request = Request(**values)
        name = self.policies[request.model]
        prompt = self.prompt(request)
        stream = Stream(request.cancel) if request.stream else None
        found = self.generate(self.models[request.model], request, prompt, stream)
        self.hold_form(request, prompt["input_ids"], found, stream)
        if request.compared:
            self.hold_tokens(request, prompt, found)
        kinds = [*request.kinds(), f"policy {name}", "answered"]
        compiled = self.compiled and request.model == 1
        self.counts.update([*kinds, "compiled"] if compiled else kinds)

    def prompt(self, request: Request) -> dict[str, torch.Tensor]:
        random = torch.Generator(self.device).manual_seed(request.number)
        size = (request.rows, request.tokens)
        ids = torch.randint(2, VOCABULARY, size, generator=random, device=self.device)
        mask = torch.ones_like(ids)
        ids[0, : request.padded], mask[0, : request.padded] = PAD, 0
        return {"input_ids": ids, "attention_mask": mask}

    def generate(self, model: Any, request: Request, prompt: Any, stream: Any, **more: Any) -> Any:
        options: dict[str, Any] = {"max_new_tokens": request.new, "do_sample": False} | more
        options |= {"do_sample": True} | request.sampler if request.sampler else {}
        if request.ends:
            options["eos_token_id"] = list(request.ends)
        if stream is not None:
            stream.prompt = request.tokens
            options["streamer"] = stream
        elif request.cancel:
            options["stopping_criteria"] = [After(request.tokens + request.cancel)]
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode() if request.inference else torch.no_grad())
            if request.autocast:
                stack.enter_context(torch.autocast(self.device, torch.bfloat16))
            if request.hook:
                place = model.model.layers[0].register_forward_hook(_steer)
                stack.callback(place.remove)
            for each in _loras(model):
                each.active = request.adapter
            with contextlib.suppress(Cancelled):
                return model.generate(**prompt, **options)
            assert request.cancel, "nobody has cancelled it"
            return None

    def hold_form(self, request: Request, ids: torch.Tensor, found: Any, stream: Any) -> None:
        """What every answer is held to: its prompt, its length, its ends, and its stream."""
        if request.cancel and stream is not None:
            streamed = len(stream.tokens) - request.tokens
            early = found is not None and streamed < request.cancel and request.ends
            self.hold(request, early or streamed == request.cancel, f"{streamed} tokens streamed")
            return
        rows, new = found.tolist(), found[:, request.tokens :].tolist()
        self.hold(request, torch.equal(found[:, : request.tokens], ids), "another prompt")
        wanted = request.cancel or request.new
        ended = [next((i for i, x in enumerate(row) if x in request.ends), wanted) for row in new]
        last = min(wanted, max(ended) + 1)
        self.hold(request, len(new[0]) == last, f"{len(new[0])} new tokens, not {last}")
        ends = all(set(row[at + 1 :]) <= {PAD} for row, at in zip(new, ended, strict=True))
        self.hold(request, ends, "tokens after an end")
        whole = stream is None or (stream.ended and stream.tokens == rows[0])
        self.hold(request, whole, "the stream has other tokens")

    def hold_tokens(self, request: Request, prompt: Any, found: torch.Tensor) -> None:
        """The same tokens as stock's; where they part, stock's two best are as good as equal."""
        more: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}
        heads = self.stock.config.num_attention_heads
        if request.rows * heads * request.tokens**2 > SCORES:
            more["prefill_chunk_size"] = CHUNK
        limit = torch._dynamo.config.recompile_limit  # which transformers raises for chunks
        with torch._dynamo.config.patch(recompile_limit=limit):
            stock = self.generate(self.stock, request, prompt, None, **more)
        wanted = stock.sequences
        size = min(found.shape[1], wanted.shape[1])
        if found.shape != wanted.shape and torch.equal(found[:, :size], wanted[:, :size]):
            self.hold(request, False, f"{found.shape}, stock's are {wanted.shape}")
        parted = found[:, :size] != wanted[:, :size]
        for row in parted.any(1).nonzero()[:, 0].tolist():
            at = int(parted[row].nonzero()[0])
            logits = stock.logits[at - request.tokens][row].float()
            best = logits.topk(2).values
            gap = float((best[0] - best[1]) / logits.abs().max())
            self.hold(request, gap < TIE[request.autocast], f"another token at {at}, gap {gap:.2g}")
            self.counts["ties"] += gap < TIE[request.autocast]

    def hold(self, request: Request, holds: Any, what: str) -> None:
        if not holds:
            self.counts["faults"] += 1
            self.faults = [*self.faults, f"{what}: {request}"][:FAULTS]
            print(self.faults[-1], flush=True)

    def settle(self) -> None:
        """What is in use between two requests, after a short one of each model."""
        short = draw(0, 0, SHORTEST, ())
        plain = dict(padded=0, stream=False, adapter="", ends=(), autocast=False, hook=False)
        plain |= dict(rows=1, tokens=min(SHORTEST, self.longest), new=4)
        for model in (0, 1):
            request = replace(short, **plain, model=model)
            for _ in range(3):
                self.generate(self.models[model], request, self.prompt(request), None)
        gc.collect()
        self.memory.append(bytes_in_use(self.device))
        self.host.append(_resident())
        self.kernels.append(self.loaded)
        self.write()
        print(f"{self.counts['answered']} answered, {self.memory[-1]:,} bytes", flush=True)

    def _count_kernel(self, **about: Any) -> None:
        """Triton has compiled a kernel, or read one from its cache: it keeps their texts."""
        self.loaded += 1

    def write(self) -> None:
        if self.out is not None:
            files.write_text(self.out, json.dumps(self.facts()))  # which another process reads

    def facts(self) -> dict[str, Any]:
        cuda = self.device == "cuda"
        most = torch.cuda.max_memory_allocated() if cuda else max(self.memory, default=0)
        return {
            "seconds": round(time.monotonic() - self.begun),
            "counts": dict(sorted(self.counts.items())),
            "faults": self.faults,
            "memory": self.memory,
            "most memory": most,
            "reserved": torch.cuda.memory_reserved() if cuda else 0,
            "host memory": self.host,
            "kernels": self.kernels,
        }


def _steer(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 1.25


def _resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def bytes_in_use(device: str) -> int:
    """Of a GPU what torch has given away; of a CPU the tensors that Python can reach."""
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    # Those that dynamo has traced with, fake or functional, have no memory.
    plain = [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter)]
    tensors = [x for x in plain if not torch._is_functional_tensor(x)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def rise(memory: list[int]) -> str:
    """What is wrong with a memory's samples, "" where they are flat: the last quarter may have a
    hundredth, or SLACK, more than the second."""
    if len(memory) < 8:
        return ""
    quarter = len(memory) // 4
    low, high = max(memory[quarter : 2 * quarter]), max(memory[-quarter:])
    return "" if high <= max(1.01 * low, low + SLACK) else f"{low:,} to {high:,} bytes"


def late_rise(memory: list[int], kernels: list[int]) -> str:
    """The same of a host's memory, in which Triton keeps each kernel that it has compiled: of the
    samples since the last of them."""
    since = [held for held, count in zip(memory, kernels, strict=True) if count == kernels[-1]]
    low, high = since[0], max(since)
    return "" if high <= 1.01 * low else f"{low:,} to {high:,} bytes since the last kernel"


def joined(parts: list[dict[str, Any]], asked: int) -> dict[str, Any]:
    """The processes' counts as one, and what is wrong with them."""
    counts: Counter[str] = Counter()
    for part in parts:
        counts.update(part["counts"])
    wrong = [fault for part in parts for fault in part["faults"]]
    lost = counts["begun"] - counts["answered"]
    wrong += [f"{lost} of {counts['begun']} requests were lost"] if lost else []
    if counts["begun"] < asked:
        wrong.append(f"{counts['begun']} of {asked} requests were begun in this time")
    for number, part in enumerate(parts):
        if text := rise(part["memory"]):
            wrong.append(f"memory of process {number}: {text}")
        if text := part["memory"] and late_rise(part["host memory"], part["kernels"]):
            wrong.append(f"host memory of process {number}: {text}")
    return {
        "seconds": max((part["seconds"] for part in parts), default=0),
        "requests": asked,
        "lost": lost,
        "wrong": wrong,
        "counts": dict(sorted(counts.items())),
        "most memory": [part["most memory"] for part in parts],
        "final memory": [part["memory"][-1] if part["memory"] else 0 for part in parts],
        "reserved": [part["reserved"] for part in parts],
        "memory": [part["memory"] for part in parts],
        "host memory": [part["host memory"] for part in parts],
        "kernels": [part["kernels"] for part in parts],
    }
