"""`check_policy`: one policy against the contract, on tiny random models.

docs/start/concepts.md lists the promises. What a tiny Llama cannot show (other model families,
other hardware, speed) is in attnplug's own tests/contract and bench.
"""

import dataclasses
from collections.abc import Collection
from itertools import pairwise
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.generation.configuration_utils import CompileConfig

import attnplug
from attnplug.models.names import CACHE
from attnplug.testing.oracle import largest
from attnplug.testing.report import Check, CheckReport, collect
from attnplug.testing.surroundings import assistant_may_warn, fresh_dynamo, inductor_may_warn

VOCABULARY = 97
PAD = 0


def tiny_model(
    *,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> LlamaForCausalLM:
    """A random two-layer Llama, 4 query and 2 KV heads of 64, that never ends a sentence.
    `config` overrides LlamaConfig's fields."""
    fields: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        initializer_range=0.3,  # attention far from uniform, logits far from ties
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):  # weights are drawn on the CPU
        torch.default_generator.manual_seed(seed)
        model: Any = LlamaForCausalLM(LlamaConfig(**(fields | config)))
    return model.eval().to(device, dtype)


def check_policy(
    policy: Any,
    *,
    exact: Any = None,
    promises: Collection[int] = range(1, 9),
    tokens: int = 70,
    device: str = "cpu",
    backend: str = "inductor",
    factor: float = 4.0,
) -> CheckReport:
    """Hold `policy` (whatever `attnplug.apply` takes) to the contract on tiny random models; raise
    AssertionError naming every broken promise, else return the report.

    `exact` is the same method with a budget that covers `tokens` tokens, or `policy` itself where
    it is exact: promises 1 and 5 are about it, and left unasked without. Errors may be at most
    `factor` times those of the stock model in the same precision against fp64. `promises` asks for
    some of the eight, `backend` is torch.compile's for the fourth.
    """
    subject = _Subject(policy, exact, tokens, device, backend, factor)
    checks: list[Check] = []
    for promise, name, method, needs_exact in PROMISES:
        if promise not in promises:
            continue
        if needs_exact and exact is None:
            checks.append(Check(name, None, "no exact setting was given", promise))
        else:
            with inductor_may_warn(), assistant_may_warn():
                checks.append(collect(name, getattr(subject, method), promise=promise))
    return CheckReport(f"check_policy({policy})", tuple(checks)).require()


PROMISES = (
    (1, "a budget large enough equals dense, prefill and decode", "equals_dense", True),
    (1, "a budget large enough equals dense with padding and holes", "equals_dense_masked", True),
    (2, "padding and batch mates do not change a row", "rows_are_alone", False),
    (2, "generated tokens do not depend on batch mates", "generated_rows_are_alone", False),
    (3, "GQA and MHA, head sizes, dtypes, T = 1 and odd T", "serves_shapes", False),
    (4, "compiles whole, equals eager, does not recompile", "compiles", False),
    (4, "compiled generate gives eager's tokens", "compiled_generate", False),
    (5, "generate gives stock tokens: greedy, beams, assisted, caches", "stock_tokens", True),
    (6, "report names every layer", "reports", False),
    (7, "remove restores the model bit for bit", "restores", False),
    (7, "another model is not touched", "leaves_others", False),
    (8, "NaN surfaces as in dense", "surfaces_nan", False),
)


@dataclasses.dataclass(frozen=True)
class _Subject:
    policy: Any
    exact: Any
    tokens: int
    device: str
    backend: str
    factor: float

    @property
    def mode(self) -> str | None:
        """CUDA graphs where there are any: only inductor knows modes."""
        graphs = self.device != "cpu" and self.backend == "inductor"
        return "reduce-overhead" if graphs else None

    def model(self, **options: Any) -> Any:
        return tiny_model(device=self.device, **options)

    def ids(self, *shape: int, seed: int = 1) -> torch.Tensor:
        random = torch.Generator().manual_seed(seed)
        return torch.randint(2, VOCABULARY, shape, generator=random, device="cpu").to(self.device)

    def lengths(self) -> list[int]:
        """Row lengths of a padded batch: one full, one odd, one short."""
        return [self.tokens, self.tokens // 2 + 1, 5]

    def padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Left-padded ids and their mask, rows of `lengths`."""
        ids = self.ids(3, self.tokens)
        mask = torch.ones_like(ids)
        for row, length in enumerate(self.lengths()):
            mask[row, : self.tokens - length] = 0
        return ids * mask, mask

    # 1

    def equals_dense(self) -> None:
        model = self.model()
        for ids in (self.ids(2, self.tokens), self.ids(1, 1), self.ids(1, 17)):
            wanted = _logits(_double(model), ids)
            room = self.room(_logits(model, ids), wanted)
            with attnplug.applied(model, self.exact):
                _close(_logits(model, ids), wanted, room, f"T={ids.shape[1]}")
                for cache in _caches(model, ids.shape[1]):
                    found = _stepwise(model, ids, cache, prefill=ids.shape[1] * 2 // 3)
                    _close(found, wanted, room, f"{type(cache).__name__}, T={ids.shape[1]}")

    def equals_dense_masked(self) -> None:
        model = self.model()
        ids, mask = self.padded()
        holes = mask.clone()
        holes[0, self.tokens // 4 : self.tokens // 2] = 0  # an empty middle
        for label, each in (("padding", mask), ("an empty middle", holes)):
            wanted = _logits(_double(model), ids, each)
            room = self.room(_logits(model, ids, each), wanted, each)
            with attnplug.applied(model, self.exact):
                _close(_logits(model, ids, each), wanted, room, label, each)

    def room(
        self, plain: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor | None = None
    ) -> float:
        """What the policy may err by: `factor` times what the stock model does."""
        error = plain - wanted
        if mask is not None:
            error = error[mask.bool()]
        return self.factor * largest(error) + 1e-6 * largest(wanted)

    # 2

    def rows_are_alone(self) -> None:
        model = self.model()
        ids, mask = self.padded()
        for way, steps in (("prefill", 0), ("decode", 3)):
            stock = _rows(model, ids, mask, DynamicCache(), steps)
            batch = self.served_rows(model, ids, mask, steps)
            for row, length in enumerate(self.lengths()):
                own = ids[row : row + 1, -length:], mask[row : row + 1, -length:]
                plain = _rows(model, *own, DynamicCache(), steps)[0]
                alone = self.served_rows(model, *own, steps)[0]
                room = 4 * self.room(stock[row, -length:], plain)
                label = f"{way}, row of {length} tokens, padded by {self.tokens - length}"
                _close(batch[row, -length:], alone, room, label)

    def served_rows(
        self, model: Any, ids: torch.Tensor, mask: torch.Tensor, steps: int
    ) -> torch.Tensor:
        with attnplug.applied(model, self.policy):
            return _rows(model, ids, mask, attnplug.make_cache(model, self.tokens), steps)

    def generated_rows_are_alone(self) -> None:
        model = self.model()
        ids, mask = self.padded()
        with attnplug.applied(model, self.policy):
            batch = _generate(model, ids, mask)
            for row, length in enumerate(self.lengths()):
                alone = _generate(model, ids[row : row + 1, -length:])
                padding = self.tokens - length
                _same(batch[row], alone[0], f"row of {length} tokens, padded by {padding}")

    # 3

    def serves_shapes(self) -> None:
        odd = (1, 2, 17, self.tokens - 1)
        for heads, dim in ((1, 64), (2, 80), (4, 128), (4, 48), (2, 256)):
            model = self.model(num_key_value_heads=heads, head_dim=dim)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                model.to(dtype)
                with attnplug.applied(model, self.policy):
                    for queries in odd if dim == 64 else odd[2:3]:
                        found = _stepwise(model, self.ids(2, queries + 1), DynamicCache(), queries)
                        label = f"{heads} KV heads of {dim}, {dtype}, T={queries}"
                        assert torch.isfinite(found).all(), f"{label}: not finite"

    # 4

    def compiles(self) -> None:
        model = self.model()
        ids = self.ids(2, 24)
        with attnplug.applied(model, self.policy), fresh_dynamo():
            eager_cache, cache = (attnplug.make_cache(model, 64) for _ in range(2))
            wanted = _stepwise(model, ids, eager_cache, prefill=16)
            config = model.config
            cache.early_initialization(
                2, config.num_key_value_heads, config.head_dim, torch.float32, model.device
            )
            compiled = torch.compile(
                model.forward, fullgraph=True, backend=self.backend, mode=self.mode
            )
            found = [_step(compiled, ids[:, at : at + 8], cache) for at in (0, 8)]
            found += [_step(compiled, ids[:, at : at + 1], cache) for at in (16, 17)]
            with torch._dynamo.config.patch(error_on_recompile=True):
                found += [_step(compiled, ids[:, at : at + 1], cache) for at in range(18, 24)]
        room = 1e-4 * largest(wanted)
        _close(torch.cat(found[2:], 1), wanted[:, 16:], room, "compiled decode")
        if self.exact is not None and str(self.exact) == str(self.policy):
            _close(torch.cat(found[:2], 1), wanted[:, :16], room, "compiled chunked prefill")

    def compiled_generate(self) -> None:
        model = self.model()
        ids, mask = self.padded()
        compiling: Any = CompileConfig(fullgraph=True, backend=self.backend)
        compiling.mode = self.mode
        compiling._compile_all_devices = True
        with attnplug.applied(model, self.policy), fresh_dynamo():
            eager = _generate(model, ids, mask, cache_implementation="static", disable_compile=True)
            found = _generate(
                model, ids, mask, cache_implementation="static", compile_config=compiling
            )
        _same(found, eager, "compiled")

    # 5

    def stock_tokens(self) -> None:
        model = self.model()
        ids, mask = self.padded()
        one = ids[:1]
        ways: dict[str, tuple[torch.Tensor, torch.Tensor | None, dict[str, Any]]] = {
            "greedy": (ids, mask, {}),
            "static cache": (ids, mask, {"cache_implementation": "static"}),
            "beams": (ids, mask, {"num_beams": 3}),
            "prompt lookup": (one.repeat(1, 2), None, {"prompt_lookup_num_tokens": 3}),
            "chunked prefill": (one, None, {"prefill_chunk_size": 16}),
            "assisted": (one, None, {"assistant_model": self.model(seed=3)}),
        }
        for name, (prompt, padding, options) in ways.items():
            wanted = _generate(model, prompt, padding, disable_compile=True, **options)
            with attnplug.applied(model, self.exact):
                found = _generate(model, prompt, padding, disable_compile=True, **options)
            _same(found, wanted, name)
        wanted = _generate(model, one)
        for cache in _caches(model, self.tokens + NEW_TOKENS):
            with attnplug.applied(model, self.exact):
                found = _generate(model, one, disable_compile=True, **{CACHE: cache})
            _same(found, wanted, f"the user's {type(cache).__name__}")

    # 6

    def reports(self) -> None:
        model = self.model()
        with attnplug.applied(model, self.policy):
            report = attnplug.report(model)
        found = [layer.index for layer in report.layers]
        wanted = list(range(model.config.num_hidden_layers))
        assert found == wanted, f"layers {found} instead of {wanted}:\n{report}"

    # 7

    def restores(self) -> None:
        model = self.model()
        ids = self.ids(2, 20)
        before = _logits(model, ids)
        tokens = _generate(model, ids)
        # generate notes on the model that it made a static cache, with or without a policy
        _generate(model, ids, cache_implementation="static", disable_compile=True)
        state = _state(model)
        with attnplug.applied(model, self.policy):
            _generate(model, ids)
        changed = [name for name, value in _state(model).items() if state.get(name) != value]
        assert not changed, f"remove left {', '.join(changed)} changed"
        assert torch.equal(_logits(model, ids), before), "logits differ after remove"
        _same(_generate(model, ids), tokens, "after remove")

    def leaves_others(self) -> None:
        model, other = self.model(), self.model(seed=7)
        ids = self.ids(2, 20)
        before = _logits(other, ids)
        with attnplug.applied(model, self.policy):
            assert torch.equal(_logits(other, ids), before), "the other model's logits changed"

    # 8

    def surfaces_nan(self) -> None:
        model = self.model()
        ids = self.ids(2, self.tokens)
        poison = VOCABULARY - 1
        ids[ids == poison] = poison - 1
        ids[0, self.tokens // 3] = poison
        with torch.no_grad():
            model.get_input_embeddings().weight[poison] = torch.nan
        wanted = _logits(model, ids).isnan().all(-1)
        assert wanted.any() and not wanted.all(), "the stock model hides the NaN"
        sees = torch.zeros_like(wanted)  # a stock kernel may show it to earlier queries as well
        sees[0, self.tokens // 3 :] = True
        with attnplug.applied(model, self.policy):
            for label, found in (
                ("prefill", _logits(model, ids)),
                ("decode", _stepwise(model, ids, DynamicCache(), self.tokens * 2 // 3)),
            ):
                hidden = wanted & sees & ~found.isnan().all(-1)
                assert not hidden.any(), f"{label}: hidden at {hidden.nonzero().tolist()[:4]}"
                leaked = found.isnan().any(-1) & ~wanted
                assert not leaked.any(), f"{label}: leaked to {leaked.nonzero().tolist()[:4]}"


NEW_TOKENS = 9


def _double(model: Any) -> Any:
    """The same weights in fp64 (SDPA: eager attention takes its softmax in fp32)."""
    config = dict(model.config.to_dict(), attn_implementation="sdpa")
    wide = LlamaForCausalLM(LlamaConfig(**config)).eval().to(model.device, torch.float64)
    wide.load_state_dict(model.state_dict())
    return wide


def _positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


@torch.no_grad()
def _logits(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """fp64 copies of the logits `[B,T,V]` of one forward pass without a cache."""
    positions = None if mask is None else _positions(mask)
    out = model(ids, attention_mask=mask, position_ids=positions, use_cache=False)
    return out.logits.double()


@torch.no_grad()
def _step(forward: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    return forward(ids.contiguous(), use_cache=True, **{CACHE: cache}).logits.double()


def _stepwise(model: Any, ids: torch.Tensor, cache: Any, prefill: int) -> torch.Tensor:
    """The logits of a prefill of the first tokens and then one step for each that follows."""
    found = [_step(model, ids[:, :prefill], cache)] if prefill else []
    found += [_step(model, ids[:, at : at + 1], cache) for at in range(prefill, ids.shape[1])]
    return torch.cat(found, 1)


@torch.no_grad()
def _rows(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, cache: Any, steps: int
) -> torch.Tensor:
    """The logits of left-padded rows, whose last `steps` tokens are decoded over the cache."""
    if not steps:
        return _logits(model, ids, mask)
    tokens, positions, found = ids.shape[1], _positions(mask), []
    for begin, end in pairwise([0, *range(tokens - steps, tokens + 1)]):
        out = model(
            ids[:, begin:end].contiguous(),
            attention_mask=mask[:, :end],
            position_ids=positions[:, begin:end],
            use_cache=True,
            **{CACHE: cache},
        )
        found.append(out.logits.double())
    return torch.cat(found, 1)


def _caches(model: Any, tokens: int) -> list[Any]:
    """What a user may pass: a dynamic cache and a static one with room to spare."""
    return [DynamicCache(), StaticCache(model.config, max_cache_len=tokens + 13)]


@torch.no_grad()
def _generate(
    model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """The new tokens of a greedy generate."""
    mask = torch.ones_like(ids) if mask is None else mask
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, **options
    )
    assert isinstance(out, torch.Tensor)
    return out[:, ids.shape[1] :]


def _state(model: Any) -> dict[str, Any]:
    """All that apply could leave behind: every module's hooks and attributes, and the attention
    implementation."""
    state: dict[str, Any] = {"attention implementation": model.config._attn_implementation}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key.endswith("_hooks"):
                state[f"{name}.{key}"] = len(value)
            elif key not in ("_parameters", "_buffers", "_modules"):
                state[f"{name}.{key}"] = id(value) if callable(value) else type(value)
    return state


def _close(
    found: torch.Tensor,
    wanted: torch.Tensor,
    room: float,
    label: str,
    mask: torch.Tensor | None = None,
) -> None:
    if mask is not None:
        found, wanted = found[mask.bool()], wanted[mask.bool()]
    error = (found - wanted).abs()
    assert (error <= room).all(), f"{label}: off by {float(error.max()):.3g}, allowed {room:.3g}"


def _same(found: torch.Tensor, wanted: torch.Tensor, label: str) -> None:
    assert torch.equal(found, wanted), f"{label}: {found.tolist()} instead of {wanted.tolist()}"
