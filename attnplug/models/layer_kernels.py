"""One kernel each for a decoder layer's norms, rotary embedding and gated activation, while
`generate` prefills and while it captures steps (ops/layer has what that saves). Short prompts wait
for the host, to which these kernels are no less work. They have only their norms in two of torch's
ops, where the model's own code is eight.

A module is served where its code is, instruction for instruction, code that is known here: Llama's
or Gemma's, which most families repeat. The kernels stand in for `forward` on the instance and only
within `on`, so that hooks run, adapters multiply, and nothing is left behind. They leave a call to
the model's own code where torch traces it, records gradients, or brings tensors of another kind.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import torch
from transformers.activations import ACT2FN

from attnplug.models import known_code
from attnplug.models.known_code import same_code
from attnplug.models.own_code import names_of, own_code
from attnplug.models.walk import all_modules
from attnplug.ops.common.triton import INSTALLED
from attnplug.ops.layer import gated, rms_norm, rotate

ROTATE, HALF = "apply_rotary_pos_emb", "rotate_half"  # in the globals of a family's file
DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
KERNELS = "_attnplug_kernels"  # on the model
DEVICES = {"cuda"}
# Numbers in a prompt's hidden states below which the host is what a prefill waits for: torch's own
# elementwise kernels are done before the next one is launched. 877 tokens of a 7B model, between
# 128, where stock transformers took 22 ms on an H200, and 1,024, where the GPU took 31.
SHORT = 3 << 20
NORMS, TURNS, GATES = "norms", "rotary embeddings", "activations"
Forward = Callable[..., Any]


@dataclass
class LayerKernels:
    """The modules of a model that have kernels here, each with the forward that stands in for its
    own, and `counts`, by what they are. They are found at the first call, and again where a module
    or a class is not what it was, so that a model which is changed between two calls is served as
    it is now."""

    forwards: list[tuple[torch.nn.Module, Forward]] = field(default_factory=list)
    few_ops: list[tuple[torch.nn.Module, Forward]] = field(default_factory=list)  # short prompts'
    attentions: list[torch.nn.Module] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)  # all, when they were found
    counts: Counter[str] = field(default_factory=Counter)
    turned: dict[Forward, Any] = field(default_factory=dict)  # by an attention's own forward
    looked: Any = None  # what the modules and their classes were when they were found

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model has modules of its own."""
        return LayerKernels, ()

    def serves(self, model: torch.nn.Module) -> bool:
        """Whether each layer's norms, rotary embedding and activation have kernels, which makes the
        model's own steps as fast as compiled ones (docs/log/house.md)."""
        layers = self.counts[TURNS] if self._ready(model) else 0
        return 0 < layers <= self.counts[GATES] and layers < self.counts[NORMS]

    def _ready(self, model: torch.nn.Module) -> bool:
        """Whether kernels can run for a model where it is; its modules are found then."""
        compiled = model._compiled_call_impl is not None or "forward" in vars(model)
        if not INSTALLED or model.device.type not in DEVICES or compiled:
            return False
        if self.looked is None or self.looked != self._look():
            self.find(model)
        return True

    def _look(self) -> Any:
        """All that decides which kernel a module has; compared by identity."""
        modules = [*(module for module, _ in self.forwards), *self.attentions]
        kinds = {kind: _pieces(kind) for kind in set(map(type, modules))}
        compiled = [each for each in self.modules if each._compiled_call_impl is not None]
        return kinds, compiled, [(type(module), _acts(module)) for module in modules]

    def find(self, model: torch.nn.Module) -> None:
        self.forwards, self.few_ops, self.attentions, self.counts = [], [], [], Counter()
        self.modules = all_modules(model)
        compiled = [each for each in self.modules if each._compiled_call_impl is not None]
        traced = {part for each in compiled for part in all_modules(each)}
        modules = [each for each in self.modules if each not in traced]
        kinds = {type(module) for module in modules}
        offsets = {kind: _norm_offset(kind) for kind in kinds}
        gating, rotating = set(filter(_gates, kinds)), set(filter(_rotates, kinds))
        for module in modules:
            kind = type(module)
            offset = offsets[kind]
            if offset is not None:
                self._add(NORMS, module, _norm(module, offset))
                if not offset:
                    self.few_ops.append((module, _norm_of_few_ops(module)))
            elif kind in gating and _activation(module):
                self._add(GATES, module, _mlp(module, _activation(module)))
            elif kind in rotating:
                self.attentions.append(module)
                self.counts[TURNS] += 1
        self.looked = self._look()

    def _add(self, name: str, module: torch.nn.Module, forward: Forward) -> None:
        self.forwards.append((module, forward))
        self.counts[name] += 1

    @contextmanager
    def on(self, model: torch.nn.Module, short: bool = False) -> Iterator[None]:
        """Within it the kernels stand in, or for a `short` prompt the norms of few ops. A module
        whose forward somebody else has replaced, a model that is compiled, and parts of it that
        are, keep their own code."""
        if not self._ready(model):
            yield
            return
        standing_in = self.few_ops if short else [*self.forwards, *self._turning()]
        taken: list[tuple[torch.nn.Module, Any]] = []
        try:
            for module, forward in standing_in:
                if "forward" not in vars(module):
                    vars(module)["forward"] = forward
                    taken.append((module, forward))
            yield
        finally:
            for module, forward in taken:
                if vars(module).get("forward") is forward:  # not another one by now
                    del vars(module)["forward"]

    def _turning(self) -> list[tuple[torch.nn.Module, Forward]]:
        kinds = {kind: self._turned(kind) for kind in set(map(type, self.attentions))}
        return [(each, MethodType(kinds[type(each)], each)) for each in self.attentions]

    def _turned(self, attention: Any) -> Forward:
        """An attention's forward whose rotary embedding is the kernel: the same code, with the
        names of its file as they are now but for that one. The same object while they are, as
        dynamo guards what it compiles by it."""
        own: Any = own_code(attention.forward)
        names: dict[str, Any] = own.__globals__
        made = self.turned.get(own)
        used = [name for name in own.__code__.co_names if name != ROTATE]
        if made is None or any(made.__globals__.get(x) is not names.get(x) for x in used):
            changed = {**names, ROTATE: _rotary(names[ROTATE])}
            made = FunctionType(
                own.__code__, changed, own.__name__, own.__defaults__, own.__closure__
            )
            made.__kwdefaults__ = own.__kwdefaults__
            self.turned[own] = made
        return made

    def __str__(self) -> str:
        """One line for `report`, "" before the first call on a GPU."""
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        return f"a kernel each for {counts}" if counts else ""


def layer_kernels(model: torch.nn.Module, short: bool = False) -> AbstractContextManager[None]:
    """Within it the kernels of a model stand in, where `apply` has given it any."""
    kernels: LayerKernels | None = vars(model).get(KERNELS)
    return nullcontext() if kernels is None else kernels.on(model, short)


def prompt_kernels(
    model: Any, ids: torch.Tensor, config: Any, inputs: Mapping[str, Any]
) -> AbstractContextManager[None]:
    """`layer_kernels` for a prefill of `generate`."""
    embeds = inputs.get("inputs_embeds")
    if embeds is None:
        chunk = config.prefill_chunk_size or ids.shape[1]
        width = getattr(model.config.get_text_config(decoder=True), "hidden_size", SHORT)
        numbers = ids.shape[0] * min(chunk, ids.shape[1]) * width
    else:
        numbers = embeds.numel()
    return layer_kernels(model, numbers < SHORT)


def has_quick_steps(model: torch.nn.Module) -> bool:
    """Whether a model's own steps, captured, need not be compiled."""
    kernels: LayerKernels | None = vars(model).get(KERNELS)
    return kernels is not None and kernels.serves(model)


def _norm_offset(kind: type) -> bool | None:
    """Whether a norm's weight is an offset from 1; None of what is no known norm."""
    if same_code(kind.forward, known_code.llama_norm):
        return False
    own = getattr(kind, "_norm", None)
    gemma = same_code(kind.forward, known_code.gemma_norm) and same_code(
        own, known_code.gemma_norm_of
    )
    return True if gemma else None


def _gates(kind: type) -> bool:
    """Whether these are MLPs of `down(act(gate(x)) * up(x))`."""
    return same_code(kind.forward, known_code.llama_mlp)


def _rotates(kind: type) -> bool:
    """Whether an attention's forward rotates by the known functions."""
    inner = own_code(kind.forward)
    if not isinstance(inner, FunctionType) or ROTATE not in inner.__code__.co_names:
        return False
    names = inner.__globals__
    rotates = same_code(names.get(ROTATE), known_code.apply_rotary_pos_emb)
    return rotates and same_code(names.get(HALF), known_code.rotate_half)


def _pieces(kind: type) -> tuple[Any, ...]:
    """The functions of a class, and of its file, by which it is known."""
    names = names_of(kind)
    return kind.forward, getattr(kind, "_norm", None), names.get(ROTATE), names.get(HALF)


def _acts(module: torch.nn.Module) -> tuple[Any, ...]:
    """An MLP's activation, with its class and that one's code, and what users have put around it.
    Looked up as torch keeps it: each call of generate asks every module, and most have none."""
    act = module._modules.get("act_fn")
    if act is None:
        return ()
    return act, type(act), type(act).forward, *_around(act)


def _around(act: torch.nn.Module) -> tuple[Any, ...]:
    """The hooks of a module, and a forward of its own."""
    own = vars(act).get("forward")
    hooks = (*act._forward_hooks.values(), *act._forward_pre_hooks.values())
    return hooks if own is None else (own, *hooks)


def _activation(module: torch.nn.Module) -> str:
    """The kernel's name for an MLP's activation, "" where there is none, and where a hook or a
    forward of its own wants to see the call."""
    act = module._modules.get("act_fn")
    if act is None or _around(act):
        return ""
    kind = type(act)
    return next((name for key, name in ACTIVATIONS.items() if kind is type(ACT2FN[key])), "")


def _is_plain(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether tensors may go to a kernel: plain ones of one dtype on the current GPU, whose last
    dimension is contiguous, of a call that nobody traces, casts or differentiates."""
    kind = x.device.type
    if type(x) is not torch.Tensor or kind not in DEVICES or x.dtype not in DTYPES:
        return False
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(kind) or x.numel() == 0:
        return False
    if kind == "cuda" and x.get_device() != torch.cuda.current_device():
        return False
    records = torch.is_grad_enabled()
    for each in (x, *others):
        if each.dtype != x.dtype or each.device != x.device or each.stride(-1) != 1:
            return False
        if records and each.requires_grad:
            return False
    return True


def _norm(module: Any, unit_offset: bool) -> Forward:
    own = MethodType(type(module).forward, module)

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        weight = module.weight
        if type(weight) is not torch.nn.Parameter or not _is_plain(hidden_states, weight):
            return own(hidden_states)
        eps = module.eps if unit_offset else module.variance_epsilon
        return rms_norm(hidden_states, weight, eps, unit_offset)

    return forward


def _norm_of_few_ops(module: Any) -> Forward:
    """Llama's norm, rounded as its own code rounds: before the weight and behind it."""
    own = MethodType(type(module).forward, module)

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        weight = module.weight
        if type(weight) is not torch.nn.Parameter or not _is_plain(hidden_states, weight):
            return own(hidden_states)
        size = hidden_states.shape[-1:]
        normed = torch.nn.functional.rms_norm(hidden_states, size, None, module.variance_epsilon)
        return weight * normed

    return forward


def _mlp(module: Any, activation: str) -> Forward:
    own = MethodType(type(module).forward, module)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not _is_plain(x):
            return own(x)
        gate, up = module.gate_proj(x), module.up_proj(x)
        if gate.shape == up.shape and _is_plain(gate, up):
            return module.down_proj(gated(gate, up, activation))
        return module.down_proj(module.act_fn(gate) * up)

    return forward


def _rotary(own: Forward) -> Forward:
    def turn(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        served = unsqueeze_dim == 1 and q.dim() == 4 and q.shape[-1] == cos.shape[-1]
        if not (served and cos.is_contiguous() and sin.is_contiguous()):
            return own(q, k, cos, sin, unsqueeze_dim)
        if q.shape[-1] % 2 or not _is_plain(q, k, cos, sin):
            return own(q, k, cos, sin, unsqueeze_dim)
        return rotate(q, k, cos, sin)

    return turn
