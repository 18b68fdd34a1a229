"""What a server is asked to run: the policy in vLLM's options, and what is refused at start.

    --additional-config.attnplug "momo+gather"
    --additional-config '{"attnplug": {"policy": "momo+gather", "layers": {"0-1": "dense"}}}'

or the environment variable ATTNPLUG_POLICY. vLLM hands the options to its workers. A policy that
traces needs the option `--logits-processors` besides (`REQUESTS`).
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from attnplug.serve.paged import phases as paged
from attnplug.serve.paged.phases import VARIABLE, Engine, Phases, ServedPolicy, fp8_refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "attnplug"
CACHES = ("auto", "bfloat16", "float16")
FP8_CACHES = ("fp8", "fp8_e4m3")
REQUESTS = "attnplug.serve.vllm.requests:Requests"  # what tells which request a row is
VLLM = Engine(
    "vLLM",
    KEY,
    f'add --additional-config.attnplug "momo+gather", or set {VARIABLE}',
    "offload, --kv-offloading-size",
    "momo for prefill, gather, gvr or sketch for decode and stream to trace",
    {
        "certified": "vLLM's own quantized cache, --kv-cache-dtype fp8, with vLLM's own attention",
        "auto": "the methods by name, such as 'momo+gather'",
        "stream": "it as what looks on, such as 'momo+stream'; momo serves prefill",
        "trained": "vLLM's own kernels for models with an indexer, without attnplug",
    },
)


@dataclasses.dataclass(frozen=True)
class TraceOptions:
    """Where traces of prompts go, and how many at most: `files` in the folder of `megabytes`
    together, for each process of the server. `asked`: only of requests that ask for it."""

    folder: str = "attnplug-traces"
    files: int = 16
    megabytes: float = 1024
    asked: bool = False

    def __post_init__(self) -> None:
        whole = type(self.files) is int and self.files > 0
        number = isinstance(self.megabytes, int | float) and not isinstance(self.megabytes, bool)
        for option, valid, needed in (
            ("folder", isinstance(self.folder, str) and self.folder, "a path"),
            ("files", whole, "an integer above 0"),
            ("megabytes", number and self.megabytes > 0, "a number above 0"),
            ("asked", isinstance(self.asked, bool), "true or false"),
        ):
            if not valid:
                raise VLLM.error(f"traces: {option}={getattr(self, option)!r}, needs {needed}")


@dataclasses.dataclass(frozen=True)
class TracedPolicy(ServedPolicy):
    """A server's policy, with what becomes of the traces that it makes."""

    traces: TraceOptions = TraceOptions()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_traces()

    def _check_traces(self) -> None:
        """One file holds all layers of a prompt, in blocks of one size."""
        traced = [phases for phases in self.all_phases if phases.trace is not None]
        methods = sorted({str(phases.trace) for phases in traced})
        if len(methods) > 1:
            raise VLLM.error(
                f"the layers are traced by {' and '.join(methods)}; one file holds them all: keep "
                "one"
            )
        if self.trace is None or self.trace.of != "policy":
            return
        followed = [phases.prefill for phases in traced if phases.prefill is not None]
        if not followed:
            raise VLLM.error(
                "stream(of='policy') follows the method that serves prefill, and dense reads every "
                "block; use 'momo+stream(of='policy')', or of='model'"
            )
        if len({(momo.query_block, momo.block) for momo in followed}) > 1:
            raise VLLM.error(
                "stream(of='policy') follows momo in blocks of several sizes; one file holds one: "
                "give all layers the same block and query_block"
            )


def policy_of(config: "VllmConfig") -> TracedPolicy:
    """The policy in a server's options. Raises ServeError or PolicyError."""
    return read_policy((config.additional_config or {}).get(KEY) or os.environ.get(VARIABLE))


def read_policy(option: Any) -> TracedPolicy:
    """The policy that an option describes: a string, or a mapping with `policy`, `layers` and
    `traces`."""
    traces = option.get("traces") if isinstance(option, Mapping) else None
    rest = option
    if isinstance(option, Mapping):
        rest = {key: value for key, value in option.items() if key != "traces"}
    read = paged.read_policy(rest, VLLM)
    made = TracedPolicy(VLLM, read.whole, read.spans, read.text, _trace_options(traces))
    if rest != option and made.trace is None:
        raise VLLM.error(
            "traces are given, and no layer is traced; use a policy that traces, such as "
            "'momo+stream'"
        )
    return made


def _trace_options(given: Any) -> TraceOptions:
    names = [field.name for field in dataclasses.fields(TraceOptions)]
    if given is not None and (not isinstance(given, Mapping) or not {*given} <= {*names}):
        raise VLLM.error(f"traces is {given!r}, needs a mapping with any of {', '.join(names)}")
    return TraceOptions(**(given or {}))


def phases_of(policy: str) -> Phases:
    """What a policy's string puts in the place of dense on vLLM's pages."""
    return paged.phases_of(policy, VLLM)


def check_server(config: "VllmConfig", policy: TracedPolicy) -> None:
    """Raise ServeError for a server whose other options a sparse phase cannot live with."""
    check_cache(config.cache_config.cache_dtype, policy, config.model_config.dtype)
    for asked, message in _conflicts(config, policy):
        if asked:
            raise VLLM.error(message)


def check_cache(dtype: str, policy: TracedPolicy, model: torch.dtype) -> None:
    """Raise ServeError for a cache of this `--kv-cache-dtype` that the policy cannot read, or that
    FlashAttention cannot beside a model of this dtype."""
    if dtype in FP8_CACHES:
        why = fp8_refusal(policy)
        if not why and model != torch.bfloat16:
            why = "vLLM's FlashAttention answers from it in bfloat16 alone; add --dtype bfloat16"
        if why:
            raise VLLM.error(f"--kv-cache-dtype {dtype}: {why}")
    elif dtype not in CACHES:
        raise VLLM.error(
            f"--kv-cache-dtype {dtype}: attnplug reads keys in 16 bits or in fp8 (e4m3); use auto "
            "or fp8, or vLLM's own backends with that cache"
        )


def _conflicts(config: "VllmConfig", policy: TracedPolicy) -> list[tuple[bool, str]]:
    parallel = config.parallel_config
    traces = _trace_conflicts(config) if policy.trace is not None else []
    layers = config.model_config.get_total_num_hidden_layers()
    return [
        (
            policy.farthest >= layers,
            f"layers names layer {policy.farthest}, and the model's are 0 to {layers - 1}",
        ),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "context parallelism splits a row's pages over GPUs; use --tensor-parallel-size, which "
            "splits heads",
        ),
        (
            policy.decode is not None and config.kv_transfer_config is not None,
            f"a KV connector fills pages that {policy.decode and policy.decode.name} knows nothing "
            "of; use 'momo', which keeps nothing beside them, or drop the connector",
        ),
        (
            config.speculative_config is not None,
            "speculative decoding gives rows several queries, which is not served; drop "
            "--speculative-config, or use --attention-backend FLASH_ATTN",
        ),
        (
            config.model_config.use_mla,
            "the model keeps latents instead of keys (MLA); use vLLM's own MLA backends",
        ),
        *traces,
    ]


def _trace_conflicts(config: "VllmConfig") -> list[tuple[bool, str]]:
    return [
        (
            config.model_config.runner_type == "pooling",
            "stream: vLLM tells of the requests of models that generate; trace a model that "
            "embeds with attnplug.trace.record in transformers",
        ),
        (
            REQUESTS not in map(_place, config.model_config.logits_processors or ()),
            "stream: a backend does not see whose tokens a batch holds, a logits processor does; "
            f"add --logits-processors {REQUESTS} (it leaves the logits alone)",
        ),
        (
            getattr(config, "use_v2_model_runner", False),
            "stream: the logits processor that tells whose tokens a batch holds is one of vLLM's "
            "model runner V1; set VLLM_USE_V2_MODEL_RUNNER=0",
        ),
        (
            config.parallel_config.use_ubatching,
            "stream: dual batch overlap cuts batches in two; drop --enable-dbo",
        ),
    ]


def _place(processor: Any) -> str:
    """Where a logits processor is defined, as vLLM's option names it."""
    if isinstance(processor, str):
        return processor
    return f"{processor.__module__}:{processor.__qualname__}"
