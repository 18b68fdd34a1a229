"""What a server is asked to run: the policy in vLLM's options, and what is refused at start.

    --additional-config.attnplug "momo+gather"
    --additional-config '{"attnplug": {"policy": "momo+gather", "layers": {"0-1": "dense"}}}'

or the environment variable ATTNPLUG_POLICY. vLLM hands the options to its workers. A policy that
traces needs the option `--logits-processors` besides (`REQUESTS`).
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attnplug.errors import ServeError
from attnplug.policies import Dense, Gather, Gvr, Momo, Phase, Policy, Stream, parse

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "attnplug"
VARIABLE = "ATTNPLUG_POLICY"
EXAMPLE = '--additional-config.attnplug "momo+gather"'
REQUESTS = "attnplug.serve.vllm.requests:Requests"  # what tells which request a row is
INSTEAD = {
    "certified": "vLLM's own quantized cache, --kv-cache-dtype fp8, with vLLM's own attention",
    "sketch": "gather or gvr, whose ops read vLLM's pages",
    "auto": "the methods by name, such as 'momo+gather'",
    "stream": "it as what looks on, such as 'momo+stream'; momo serves prefill",
    "trained": "vLLM's own kernels for models with an indexer, without attnplug",
}


@dataclasses.dataclass(frozen=True)
class Phases:
    """What serves one layer: momo or None for dense prefill, gather, gvr or None for dense
    decode; and what looks on at its prefill."""

    prefill: Momo | None = None
    decode: Gather | Gvr | None = None
    trace: Stream | None = None

    @property
    def sparse(self) -> bool:
        """Whether anything but dense serves."""
        return self.prefill is not None or self.decode is not None


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
                value = getattr(self, option)
                raise ServeError(f"attnplug in vLLM: traces: {option}={value!r}, needs {needed}")


@dataclasses.dataclass(frozen=True)
class ServedPolicy:
    """A server's policy: that of all layers, and those of spans of layers, first to last. `text`
    is the policy of all layers."""

    whole: Phases
    spans: tuple[tuple[int, int, Phases], ...] = ()
    text: str = "dense"
    traces: TraceOptions = TraceOptions()

    def of_layer(self, index: int) -> Phases:
        """What serves the layer of this index."""
        for first, last, phases in self.spans:
            if first <= index <= last:
                return phases
        return self.whole

    @property
    def decode(self) -> Gather | Gvr | None:
        """The one method that decodes, on some layers at least."""
        found = [phases.decode for phases in self._all if phases.decode is not None]
        return found[0] if found else None

    @property
    def trace(self) -> Stream | None:
        """The one method that traces, on some layers at least."""
        return next((phases.trace for phases in self._all if phases.trace is not None), None)

    @property
    def _all(self) -> list[Phases]:
        return [*(phases for _, _, phases in self.spans), self.whole]

    def __post_init__(self) -> None:
        self._check_traces()
        decodes = {phases.decode for phases in self._all if phases.decode is not None}
        if len(decodes) > 1:
            raise ServeError(
                "attnplug in vLLM: the layers name different decode methods, "
                f"{' and '.join(sorted(map(str, decodes)))}; a step's pages and lengths are shared "
                "by all layers: keep one, and 'dense' elsewhere"
            )

    def _check_traces(self) -> None:
        """One file holds all layers of a prompt, in blocks of one size."""
        traced = [phases for phases in self._all if phases.trace is not None]
        methods = sorted({str(phases.trace) for phases in traced})
        if len(methods) > 1:
            raise ServeError(
                f"attnplug in vLLM: the layers are traced by {' and '.join(methods)}; one file "
                "holds them all: keep one"
            )
        if self.trace is None or self.trace.of != "policy":
            return
        followed = [phases.prefill for phases in traced if phases.prefill is not None]
        if not followed:
            raise ServeError(
                "attnplug in vLLM: stream(of='policy') follows the method that serves prefill, and "
                "dense reads every block; use 'momo+stream(of='policy')', or of='model'"
            )
        if len({(momo.query_block, momo.block) for momo in followed}) > 1:
            raise ServeError(
                "attnplug in vLLM: stream(of='policy') follows momo in blocks of several sizes; "
                "one file holds one: give all layers the same block and query_block"
            )


def policy_of(config: "VllmConfig") -> ServedPolicy:
    """The policy in a server's options. Raises ServeError or PolicyError."""
    return read_policy((config.additional_config or {}).get(KEY) or os.environ.get(VARIABLE))


def read_policy(option: Any) -> ServedPolicy:
    """The policy that an option describes: a string, or a mapping with `policy`, `layers` and
    `traces`."""
    if option is None:
        raise ServeError(f"attnplug in vLLM: no policy is given; add {EXAMPLE}, or set {VARIABLE}")
    if isinstance(option, str):
        return ServedPolicy(phases_of(option), text=str(parse(option)))
    known = {"policy", "layers", "traces"}
    if not isinstance(option, Mapping) or not {"policy"} <= option.keys() <= known:
        raise ServeError(
            f"attnplug in vLLM: {KEY} is {option!r}, needs a policy, or a mapping "
            'such as {"policy": "momo+gather", "layers": {"0-1": "dense"}}'
        )
    layers = option.get("layers") or {}
    if not isinstance(layers, Mapping):
        raise ServeError(
            f"attnplug in vLLM: layers is {layers!r}, needs a mapping such as {{'0-1': 'dense'}}"
        )
    spans = tuple((*_span(key), phases_of(policy)) for key, policy in layers.items())
    whole, text = phases_of(option["policy"]), str(parse(option["policy"]))
    made = ServedPolicy(whole, spans, text, _trace_options(option.get("traces")))
    if "traces" in option and made.trace is None:
        raise ServeError(
            "attnplug in vLLM: traces are given, and no layer is traced; use a policy that traces, "
            "such as 'momo+stream'"
        )
    return made


def _trace_options(given: Any) -> TraceOptions:
    names = [field.name for field in dataclasses.fields(TraceOptions)]
    if given is not None and (not isinstance(given, Mapping) or not {*given} <= {*names}):
        raise ServeError(
            f"attnplug in vLLM: traces is {given!r}, needs a mapping with any of {', '.join(names)}"
        )
    return TraceOptions(**(given or {}))


def _span(key: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", str(key))
    if found is None:
        raise ServeError(f"attnplug in vLLM: layers names {key!r}, needs an index or '4-7'")
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise ServeError(f"attnplug in vLLM: layers names {key!r}, needs '{last}-{first}'")
    return first, last


def phases_of(policy: str) -> Phases:
    """What a policy's string puts in the place of dense. Raises ServeError for a method that vLLM's
    pages cannot serve, with what to use instead."""
    parsed: Policy = parse(policy)
    prefill, decode, trace = parsed.prefill, parsed.decode, parsed.trace
    for phase, known in ((prefill, (Dense, Momo)), (decode, (Dense, Gather, Gvr))):
        assert phase is not None  # filled by Policy
        if type(phase) not in known:
            raise _unserved(phase)
    if trace is not None and type(trace) is not Stream:
        raise _unserved(trace)
    if parsed.trained is not None:
        raise _unserved(parsed.trained)
    if isinstance(decode, Gather):
        _check_gather(decode)
    return Phases(
        prefill if isinstance(prefill, Momo) else None,
        decode if isinstance(decode, Gather | Gvr) else None,
        trace if isinstance(trace, Stream) else None,
    )


def _unserved(phase: Phase) -> ServeError:
    instead = INSTEAD.get(
        phase.name, "momo for prefill, gather or gvr for decode and stream to trace"
    )
    return ServeError(f"attnplug in vLLM: {phase.name} is not served; use {instead}")


def _check_gather(phase: Gather) -> None:
    if phase.kv == "host":
        raise ServeError(
            "attnplug in vLLM: gather(kv='host') is not served, since vLLM owns the pages; use "
            "vLLM's offload, --kv-offloading-size, with dense decode"
        )


def check_server(config: "VllmConfig", policy: ServedPolicy) -> None:
    """Raise ServeError for a server whose other options a sparse phase cannot live with."""
    for asked, message in _conflicts(config, policy):
        if asked:
            raise ServeError(f"attnplug in vLLM: {message}")


def _conflicts(config: "VllmConfig", policy: ServedPolicy) -> list[tuple[bool, str]]:
    parallel, cache = config.parallel_config, config.cache_config
    traces = _trace_conflicts(config) if policy.trace is not None else []
    layers = config.model_config.get_total_num_hidden_layers()
    farthest = max((first for first, _, _ in policy.spans), default=0)
    return [
        (
            farthest >= layers,
            f"layers names layer {farthest}, and the model's are 0 to {layers - 1}",
        ),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "context parallelism splits a row's pages over GPUs; use --tensor-parallel-size, which "
            "splits heads",
        ),
        (
            policy.decode is not None and config.kv_transfer_config is not None,
            "a KV connector fills pages that gather and gvr know nothing of; use 'momo', which "
            "keeps nothing beside them, or drop the connector",
        ),
        (
            cache.cache_dtype not in ("auto", "bfloat16", "float16"),
            f"--kv-cache-dtype {cache.cache_dtype}: attnplug reads keys in 16 bits; use "
            "auto, or vLLM's FLASH_ATTN backend with the quantized cache",
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
