"""Which request each row of a batch belongs to, for traces: a logits processor of vLLM's that
changes no logits.

    --logits-processors attnplug.serve.vllm.requests:Requests

A backend sees a batch's rows, and not whose they are. vLLM tells its logits processors, before each
batch, of every request that comes, moves or goes, with its token ids and its sampling parameters.
In those a request may say `extra_args={"attnplug_trace": "a-name"}` (in the OpenAI server
`vllm_xargs`): a name for its trace's file, or true or false for whether it is to have one.

The option is no entry point: vLLM would load that into servers that do not use attnplug. vLLM 0.27
to 0.30 chooses its model runner V1 with the option, to which such processors belong. 0.32 has to be
told: `VLLM_USE_V2_MODEL_RUNNER=0`.
"""

import dataclasses
import weakref
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from attnplug.errors import ServeError
from attnplug.serve.paged.rows import Batch
from attnplug.serve.vllm import version
from attnplug.serve.vllm.options import TracedPolicy, policy_of
from attnplug.serve.vllm.traces import NAME, Prompt, Traced, Traces
from attnplug.trace.record import versions

logger = init_logger("vllm.attnplug")
ARGUMENT = "attnplug_trace"
_made: "weakref.WeakValueDictionary[int, Requests]" = weakref.WeakValueDictionary()


def requests_of(config: VllmConfig) -> "Requests | None":
    """What tells of the requests of the engine with this configuration, None without the option."""
    return _made.get(id(config))


def note_traced(config: VllmConfig, layers: set[int]) -> "Requests":
    """What tells of requests, having heard that these layers are traced."""
    requests = requests_of(config)
    if requests is None or requests.traces is None:
        raise ServeError(
            "attnplug in vLLM: stream: vLLM has made no logits processors here, which tell whose "
            "tokens a batch holds; use attnplug.trace.record in transformers"
        )
    requests.traces.layers |= layers
    return requests


class Requests(LogitsProcessor):
    """The requests of a batch, by row, as far as they are to be traced."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        self.config = vllm_config  # kept, so that no other has its id
        policy = policy_of(vllm_config)
        self.traces = None if policy.trace is None else _traces(vllm_config, policy)
        self.prompts: dict[int, Prompt] = {}
        self._batch: Batch | None = None
        self._rows: tuple[Traced, ...] = ()
        _made[id(vllm_config)] = self

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a request that names its trace badly."""
        _asked(sampling_params, True)

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """vLLM calls this once before each batch."""
        self._batch = None
        if self.traces is None or batch_update is None:
            return
        before = list(self.prompts.values())
        process_dict_updates(self.prompts, batch_update, self._added)
        still = {id(prompt) for prompt in self.prompts.values()}
        for prompt in before:
            if id(prompt) not in still:
                self.traces.drop(prompt, "its request left the batch before its end")

    def traced(self, batch: Batch) -> tuple[Traced, ...]:
        """The rows to record of the batch that comes. Each group of layers asks; batches that vLLM
        makes up, to try something, have no requests."""
        if self.traces is None:
            return ()
        if self._batch is None:
            self._batch, self._rows = batch, self.traces.rows(batch, self.prompts)
        return self._rows if batch == self._batch else ()

    def _added(
        self, params: SamplingParams, prompt: list[int] | None, made: list[int]
    ) -> Prompt | None:
        """A request that comes. One that has made tokens comes back, and its prompt was traced; one
        without token ids has embeddings for a prompt."""
        if self.traces is None or prompt is None or made:
            return None
        if not self.traces.layers:
            logger.warning_once(
                "attnplug: no layer is traced; the log's lines 'attnplug: prefill' say why, and if "
                "there is none, the server runs without --attention-backend CUSTOM"
            )
            return None
        return self.traces.prompt(prompt, _asked(params, not self.traces.options.asked))


def _asked(params: SamplingParams, default: bool) -> bool | str:
    """What a request says of its trace. Raises ValueError for what says nothing."""
    value = (params.extra_args or {}).get(ARGUMENT, default)
    if value in (0, 1):  # the OpenAI server makes numbers of true and false
        return bool(value)
    if isinstance(value, str) and NAME.fullmatch(value):
        return value
    raise ValueError(
        f"{ARGUMENT} is {value!r}, needs true, false or a name of up to 64 letters, digits, '.', "
        "'_' and '-'"
    )


def _traces(config: VllmConfig, policy: TracedPolicy) -> Traces:
    parallel, tokenizer = config.parallel_config, cached_tokenizer_from_config(config.model_config)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        tokenizer = None  # there is none, or one of a kind whose tokens' bytes are not known
    method: Any = policy.trace
    engine = f"@engine{parallel.data_parallel_index}" if parallel.data_parallel_index else ""
    label = f"{engine}@rank{parallel.rank}" if parallel.world_size > 1 else engine
    about = {
        "model": Path(config.model_config.model).name,
        "tokenizer": "" if tokenizer is None else type(tokenizer).__name__,
        "policy": policy.text,
        "method": method.name,
        "options": dataclasses.asdict(method),
        "versions": versions() | {"vllm": version() or ""},
    }
    return Traces(policy.traces, about, label=label, tokenizer=tokenizer)
