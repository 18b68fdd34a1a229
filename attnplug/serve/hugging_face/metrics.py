"""What a server counts of its requests, for Prometheus: tokens, the time to the first, and the
attention calls that methods and dense have served.

Calls are counted where requests are scheduled, by the lengths that the crossovers are asked about:
what a captured graph runs is not seen by the host.
"""

import time
from collections import Counter as Tally
from collections.abc import Callable
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from attnplug.models.hf import bindings_of
from attnplug.policies import Phase, Policy
from attnplug.policies.crossover import DenseBelow

SECONDS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


class Metrics:
    """The counters of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        made = {"registry": self.registry, "namespace": "attnplug"}
        self.requests = Counter("requests", "Requests that were answered", ["status"], **made)
        self.prompt = Counter("prompt_tokens", "Tokens of prompts that were begun", **made)
        self.generated = Counter("generated_tokens", "Tokens that were generated", **made)
        self.calls = Counter(
            "attention_calls",
            "Layers that computed a prompt, a piece of one, or a step of a request",
            ["phase", "served_by"],
            **made,
        )
        self.first = Histogram(
            "time_to_first_token_seconds",
            "From a request's arrival in the batch to its first token",
            buckets=SECONDS,
            **made,
        )

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def watch(self, model: Any) -> None:
        """Count what a model with a policy serves, in continuous batches and by generate."""
        served = Tally(
            "dense" if binding.policy is None else binding.policy
            for binding in bindings_of(model).values()
        )
        begin, generate = model.init_continuous_batching, model.generate

        def init_continuous_batching(*args: Any, **kwargs: Any) -> Any:
            manager = begin(*args, **kwargs)
            make = manager._create_batch_processor
            manager._create_batch_processor = lambda: counting(self, served, make(), model.device)
            return manager

        def counted(*args: Any, **kwargs: Any) -> Any:
            out = generate(*args, **kwargs)
            self._count_call(served, kwargs, out, model.device)
            return out

        model.init_continuous_batching, model.generate = init_continuous_batching, counted

    def _count_call(
        self, served: "Tally[Policy | str]", asked: dict[str, Any], out: Any, device: torch.device
    ) -> None:
        """One call of generate: its prompt, and its steps over a cache with room for all of it."""
        prompt = asked["input_ids"].shape[1]
        tokens = out.shape[1] - prompt
        room = prompt + asked["generation_config"].max_new_tokens
        self.prompt.inc(prompt)
        self.generated.inc(tokens)
        for policy, layers in served.items():
            prefill, decode = phases(policy)
            by_decode = not isinstance(decode, DenseBelow) or decode.serves(1, room, device)
            self.count("prefill", prefill, layers, long_enough(prefill, prompt, device))
            self.count("decode", decode, layers * (tokens - 1), by_decode)

    def count(self, slot: str, method: Phase | None, calls: int, by_method: bool) -> None:
        name = method.name if method is not None and by_method else "dense"
        self.calls.labels(slot, name).inc(calls)


def phases(policy: Policy | str) -> tuple[Phase | None, Phase | None]:
    """What serves a layer's prefill and decode; None where the model's own attention does."""
    return (None, None) if isinstance(policy, str) else (policy.prefill, policy.decode)


def long_enough(prefill: Phase | None, tokens: int, device: torch.device) -> bool:
    return not isinstance(prefill, DenseBelow) or tokens >= prefill.crossover(device)


def counting(
    metrics: Metrics, served: "Tally[Policy | str]", processor: Any, device: torch.device
) -> Any:
    """The processor of a continuous batch, which counts each batch that it schedules."""
    schedule: Callable[..., Any] = processor.scheduler.schedule_batch
    update: Callable[[], None] = processor.update_batch
    open_: dict[str, tuple[Any, int]] = {}  # requests, and how many of their tokens were counted

    def schedule_batch(*args: Any, **kwargs: Any) -> Any:
        found = schedule(*args, **kwargs)
        batch = found[0] or []
        for entry in batch:
            begun = open_.get(entry.state.request_id)
            if begun is None:
                metrics.prompt.inc(len(entry.state.initial_tokens))
            if begun is None or begun[0] is not entry.state:  # evicted, and begun once more
                open_[entry.state.request_id] = entry.state, 0
        _count_batch(metrics, served, batch, device)
        return found

    def update_batch() -> None:
        update()
        for name, (state, counted) in list(open_.items()):
            tokens = state.generated_len()
            if tokens and not counted and not state._true_initial_tokens:
                metrics.first.observe(time.perf_counter() - state.created_time)
            metrics.generated.inc(tokens - counted)
            open_[name] = state, tokens
            # finished, failed, or taken out since its client went away
            if state.lifespan[1] >= 0 or processor.scheduler.request_is_cancelled(name):
                del open_[name]

    processor.scheduler.schedule_batch = schedule_batch
    processor.update_batch = update_batch
    return processor


def _count_batch(
    metrics: Metrics, served: "Tally[Policy | str]", batch: list[Any], device: torch.device
) -> None:
    """A batch's prompts, pieces of prompts and steps, by what serves them on each layer."""
    steps = [x for x in batch if x.query_length == 1 and x.state.generated_len()]
    prompts = [x for x in batch if x not in steps]
    lengths = torch.tensor(
        [x.state.position_offset + 1 for x in steps], dtype=torch.int64, device="cpu"
    )
    for policy, layers in served.items():
        prefill, decode = phases(policy)
        for each in prompts:
            whole = each.query_length == len(each.state.initial_tokens)
            by_method = whole and long_enough(prefill, each.query_length, device)
            metrics.count("prefill", prefill, layers, by_method)
        if not steps:
            continue
        decode = None if isinstance(policy, str) else policy.page_phase
        far = len(steps)
        if isinstance(decode, DenseBelow):
            far = int(decode.row_crossover(device).far(lengths).sum())
        metrics.count("decode", decode, layers * far, True)
        metrics.count("decode", None, layers * (len(steps) - far), False)
