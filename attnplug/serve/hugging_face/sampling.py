"""How each row of a continuous batch gets its own request's temperature, top_p and seed.

transformers' worker has one setting for all rows, that of the first request. Here the worker takes
the largest score, and what would be drawn is the largest once noise was added to the scores
(Gumbel): a row's noise follows from its seed, its place and the token alone, so a request's draws
depend neither on its neighbours nor on when it came, and captured graphs can make them.
"""

from collections.abc import Mapping
from random import Random
from typing import Any, NamedTuple

import torch
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
)

# Numbers that transformers takes as floats only.
FLOATS = (
    "temperature", "top_p", "typical_p", "min_p", "epsilon_cutoff", "eta_cutoff",
    "repetition_penalty", "length_penalty",
)  # fmt: skip
SEED = "attnplug_seed"  # the attribute of a request's generation config
COLDEST = 1e-5  # below it, scores divided by a temperature leave float32's range
GREEDY = 0  # the noise's seed of a row that is not sampled
# splitmix64's, as signed numbers of 64 bits: they wrap around
GOLDEN, MIX_1, MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
WORD = 2**64


class Sampling(NamedTuple):
    """What one request asks for; `temperature` is 0 where its largest score is to be taken."""

    temperature: float
    top_p: float
    seed: int


def set_floats(config: Any, defaults: Any) -> None:
    """Have a generation config say whether it samples, and its numbers as floats, also where
    `generate` would take them from the model's own config, `defaults`."""
    if config.do_sample is None:
        config.do_sample = defaults.do_sample
    for name in FLOATS:
        asked = getattr(config, name, None)
        value = getattr(defaults, name, None) if asked is None else asked
        if value is not None:
            setattr(config, name, float(value))


def set_sampling(config: Any, body: Mapping[str, Any], seeds: Random) -> None:
    """Have a request's generation config say all of its sampling: transformers leaves out a
    temperature or a top_p where the model's own config is greedy, and a seed is for all requests. A
    request without a seed gets the next of `seeds`."""
    temperature, top_p = body.get("temperature"), body.get("top_p")
    if temperature or (temperature is None and top_p is not None and top_p < 1):
        config.do_sample = True
    if config.do_sample and config.temperature is not None and config.temperature < COLDEST:
        config.do_sample = False
    seed = body.get("seed")
    setattr(config, SEED, seeds.getrandbits(63) if seed is None else seed)


def seed_of(config: Any) -> int:
    return getattr(config, SEED)


def sampling_of(config: Any) -> Sampling:
    """A request's sampling, by its generation config."""
    if not config.do_sample:
        return Sampling(0.0, 1.0, seed_of(config))
    temperature, top_p = config.temperature, config.top_p
    return Sampling(
        1.0 if temperature is None else float(temperature),
        1.0 if top_p is None else float(top_p),
        seed_of(config),
    )


class RowProcessor(ContinuousBatchingLogitsProcessor):
    """One 32-bit number a row, made of its request on the host, read where the scores are."""

    asks: tuple[str, type]  # what it reads of a request
    ignored_kwargs: tuple[str, ...] = ()
    dtype = torch.float32
    default: float = 1.0

    def __init__(self) -> None:
        self.supported_kwargs = dict([self.asks])

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        filled = torch.full_like(int32_tensor, self.default, dtype=self.dtype)
        int32_tensor.copy_(filled.view(torch.int32))

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        found = [self.of(each.state) for each in requests_with_new_token]
        return torch.tensor(found, dtype=self.dtype, device="cpu").view(torch.int32)

    def of(self, state: Any) -> float:
        raise NotImplementedError


class RowTemperature(RowProcessor):
    """Divides a row's scores by its temperature. A greedy row keeps its scores."""

    asks = ("temperature", float)

    def of(self, state: Any) -> float:
        return state.logit_processor_kwargs.get("temperature", 0.0) or 1.0

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        return scores / tensor_arg[: scores.size(0)].view(torch.float32)[:, None]


class RowTopP(RowProcessor):
    """Leaves of each row the smallest set of best tokens whose probabilities come to its top_p."""

    asks = ("top_p", float)

    def of(self, state: Any) -> float:
        return state.logit_processor_kwargs.get("top_p", 1.0)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        top_p = tensor_arg[: scores.size(0)].view(torch.float32)
        if not scores.is_cuda and bool((top_p >= 1).all()):  # a graph has no such question
            return scores
        ordered, tokens = scores.sort(dim=-1)
        left_out = ordered.softmax(-1).cumsum(-1) <= (1 - top_p)[:, None]
        left_out[:, -1] = False
        left_out &= (top_p < 1)[:, None]
        return scores.masked_fill(left_out.scatter(-1, tokens, left_out), float("-inf"))


class RowDraw(RowProcessor):
    """Adds noise to the scores of rows that are sampled, after which the largest is a draw."""

    asks = ("seed", int)
    dtype = torch.int32
    default = GREEDY

    def of(self, state: Any) -> int:
        asked = state.logit_processor_kwargs
        if not asked.get("temperature", 0.0):
            return GREEDY
        return step_seed(asked["seed"], state.position_offset)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        seeds = tensor_arg[: scores.size(0)]
        if not scores.is_cuda and bool((seeds == GREEDY).all()):
            return scores
        noisy = scores + gumbel(seeds, scores.shape[-1])
        return torch.where((seeds == GREEDY)[:, None], scores, noisy)


def step_seed(seed: int, place: int) -> int:
    """The seed of one draw, not GREEDY, in 31 bits: of a request's seed and how many tokens its row
    has behind the step."""
    x = ((seed % WORD) * 0x9E3779B97F4A7C15 + place * 0xD1B54A32D192ED03) % WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return ((x ^ (x >> 31)) >> 33) or 1


def gumbel(seeds: torch.Tensor, tokens: int) -> torch.Tensor:
    """Noise of shape (rows, tokens), float32: minus the logarithm of exponential numbers."""
    place = torch.arange(1, tokens + 1, dtype=torch.int64, device=seeds.device)
    x = seeds.to(torch.int64)[:, None] * MIX_2 + place * GOLDEN
    x = (x ^ _shifted(x, 30)) * MIX_1
    x = (x ^ _shifted(x, 27)) * MIX_2
    x = x ^ _shifted(x, 31)
    uniform = (_shifted(x, 32).to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform.clamp_max(1 - 2.0**-24)))


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """`x` moved to the right, zeros coming in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def sample_by_rows(manager: Any) -> None:
    """Have a manager that has not begun sample each row by its own request. Its generation config
    had a temperature and a top_p, whose places among the processors the rows' take."""
    listed = manager.logit_processor
    own = {"Temperature": RowTemperature, "TopP": RowTopP}
    for place, processor in enumerate(listed.logits_processor):
        for name, made in own.items():
            if name in type(processor).__name__:
                listed.logits_processor[place] = made()
    listed.logits_processor.append(RowDraw())
    rows = [x for x in listed.logits_processor if isinstance(x, ContinuousBatchingLogitsProcessor)]
    listed.tensors_required = len(rows)
    listed._retrieve_processors_kwargs()
    listed.do_processing = True
    manager.generation_config.do_sample = False  # the largest score: RowDraw has drawn
