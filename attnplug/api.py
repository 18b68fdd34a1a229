"""apply, remove, applied and report: a policy on a Hugging Face model and off again."""

import fnmatch
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from attnplug.binding import (
    LayerMaker,
    Plan,
    all_or_none,
    bind,
    keeps_latents,
    picks_tokens,
    switched_names,
)
from attnplug.errors import (
    AlreadyAppliedError,
    ArgumentError,
    PolicyError,
    UnsupportedCallError,
    UnsupportedModelError,
)
from attnplug.ledger import STATE, Ledger, ledger_of, strays_of, strip, take_compiled, where_applied
from attnplug.models.batching import end_batching
from attnplug.models.cache import PlugCache
from attnplug.models.decode_loop import DecodeLoop
from attnplug.models.fuse import Fusion
from attnplug.models.generate import (
    bind_generate,
    last_call,
    own_cache,
)
from attnplug.models.hf import BINDING, Binding, binding_of, bindings_of, register_names
from attnplug.models.hook import PolicyHook, hooks_of
from attnplug.models.indexed import bind_indexed
from attnplug.models.latents import bind_latents
from attnplug.models.layers import (
    AttentionLayer,
    find_attention_layers,
    has_own_slot,
    positions,
    slot_filled_twice,
    takes_cache,
    unwrap,
)
from attnplug.models.loop_calls import unserved_model
from attnplug.models.names import ATTENTION_NAMES
from attnplug.models.owner import Owner
from attnplug.models.running import between_calls, refuse_running
from attnplug.models.served import last_served
from attnplug.models.strangers import hook_decoders, refuse_strangers
from attnplug.models.switch import copies_of_configs
from attnplug.models.warmup import generate_ahead
from attnplug.policies import Phase, Policy, parse
from attnplug.policies.crossover import NEVER, DenseBelow
from attnplug.reports import LayerReport, Report, last_calls

LOG = logging.getLogger("attnplug")
LayerKey = int | range | str
PolicyLike = str | Phase | Policy
Policies = PolicyLike | Mapping[LayerKey, PolicyLike]
Model = TypeVar("Model", bound=torch.nn.Module)


def apply(model: Model, policy: Policies, *, fuse: bool | None = None) -> Model:
    """Serve a Hugging Face model's attention by a policy. Training-free; the weights stay.

    `policy` is a string ("momo", "momo(gamma=32)", "momo+dense"), a method (`attnplug.Momo()`), a
    `Policy`, or a mapping. A mapping leads from layer index, range, "4-7" or a glob on module names
    to any of these. The first match wins, and layers without a match keep the model's own
    attention. The model is changed in place and returned. `torch.compile(fullgraph=True)` and
    generate keep working. `generate` prepares a static cache where transformers can run the model
    on one, unless told otherwise. Where a policy serves no layer, the model computes as it did.
    `report(model)` says what runs where. Where a method serves only longer prompts or caches than
    the model can read, the log `attnplug` says so, too.

    With `fuse`, steps of attnplug's decode loop compute q, k and v as one matrix product, and an
    MLP's gate and up as another. The weights of each move into one buffer, of which the parameters
    are views, which adds no memory; a wide product may round otherwise than narrow ones. With None,
    the default, weights on CUDA move at the first call of generate; True moves them at once. Unless
    it is False, norms, rotary embeddings and gated activations are a kernel each in generate.

    Raises PolicyError, UnsupportedModelError, AlreadyAppliedError, or UnsupportedCallError while a
    call of the model runs, here or in another thread; the model is then unchanged.
    """
    if not isinstance(model, torch.nn.Module) and _holds_model(model):
        raise UnsupportedModelError(f"a {type(model).__name__} is not a model: use pipe.model")
    target = unwrap(model)
    with between_calls(target, "apply"):
        _apply(target, policy, fuse)
    return model


def _holds_model(pipe: Any) -> bool:
    """A tokenizer also has a `model`, but none that computes attention."""
    return isinstance(getattr(pipe, "model", None), torch.nn.Module)


def _apply(target: Any, policy: Policies, fuse: bool | None) -> None:
    if STATE in target.__dict__:
        raise AlreadyAppliedError(
            f"this model already has the policy {target.__dict__[STATE].report.policy!r}; call "
            "attnplug.remove(model) first"
        )
    resolver = _Resolver(policy)
    strip(target, strays_of(target))
    layers = find_attention_layers(target)
    if any(hasattr(layer.module, BINDING) for layer in layers):
        raise AlreadyAppliedError(
            f"a part of this model already has a policy; {where_applied(target)}"
        )
    on = Counter(layer.shape.device for layer in layers if not layer.reason)
    plan = all_or_none(
        [(x, bind(target, x, resolver.policy_for(x), on[x.shape.device])) for x in layers]
    )
    resolver.check_all_used(layers)
    register_names()
    keeps = _keeps_cache(target, plan)
    layer_reports = tuple(_report(*entry, static=not keeps) for entry in plan)
    bound = [layer.module for layer in layers]
    loop = "" if keeps else _loop_text(unserved_model(target, [layer.kind for layer in layers]))
    unfused = "nothing is fused: transformers' loop decodes" if fuse and (keeps or loop) else ""
    notes = keeps, loop, _parallel(layers), _batching(plan), unfused
    length = _length(target, plan)
    if length:
        LOG.warning("%s", length)
    found = Report(resolver.text, layer_reports, *notes, length=length)
    ledger = Ledger(found, LayerMaker(plan), bound)
    switched = switched_names(plan)
    with ExitStack() as undo:
        undo.callback(ledger.undo, target)  # unless all of it is done
        owner = Owner(target)
        for layer, binding in plan:
            setattr(layer.module, BINDING, replace(binding, owner=owner))
        if switched:
            hooked = [x for x in layers if id(x.config) in switched and has_own_slot(x.module)]
            for layer in hooked:
                ledger.hooks.append(_hooked(layer))
            hook_decoders(target, hooked)
            ledger.configs = copies_of_configs(target, switched)
            ledger.configs.switch()
            for layer, binding in plan:
                if picks_tokens(layer, binding):
                    ledger.indexed.append(layer.module)
                    bind_indexed(layer.module)
                if keeps_latents(layer, binding):
                    ledger.latent.append(layer.module)
                    bind_latents(layer.module)
            may = fuse is not False and not (keeps or loop)
            fusion = Fusion.of(target, bool(fuse)) if may else None
            ours = None if loop else DecodeLoop(fusion=fusion)
            make = None if keeps else ledger.make_layer
            bind_generate(target, make, ours, bound, has_kernels=fuse is not False)
        ledger.compiled = take_compiled(target)
        target.__dict__[STATE] = ledger
        refuse_running(target, "apply")  # a call may have begun that nobody had to tell of
        undo.pop_all()


def remove(model: Model) -> Model:
    """Undo `apply`, and only what it did. The weights are bit for bit what they were. What others
    changed since, such as the config's vocabulary, stays. A part that was copied or taken out of a
    model with a policy loses its own. Raises NotAppliedError, and UnsupportedCallError while a call
    of the model runs, here or in another thread, or a trace of it is recorded."""
    target = unwrap(model)
    with between_calls(target, "remove"):
        _remove(target)
    return model


def _remove(target: Any) -> None:
    strays = strays_of(target)
    if strays:
        strip(target, strays)
        return
    ledger = ledger_of(target)
    if any(
        each.trace_to is not None or each.pieces is not None
        for each in bindings_of(target).values()
    ):
        raise UnsupportedCallError(
            "remove: this model is being recorded, or reads a prompt on several ranks; leave that "
            "block first"
        )
    end_batching(target)
    ledger.undo(target)


@contextmanager
def applied(model: Model, policy: Policies, *, fuse: bool | None = None) -> Iterator[Model]:
    """`with applied(model, policy):` applies the policy and removes it at the end."""
    apply(model, policy, fuse=fuse)
    try:
        yield model
    finally:
        remove(model)


def report(model: torch.nn.Module) -> Report:
    """What runs where on a model that has a policy, and why not. Raises NotAppliedError, and
    UnsupportedModelError where the attention was switched since."""
    target = unwrap(model)
    ledger = ledger_of(target)
    hooked = {module for _, module in ledger.hooks}
    for layer in find_attention_layers(target):
        astray = any(hook.is_astray(layer.module) for hook in hooks_of(layer.module))
        if astray or binding_of(layer.module) is None:
            raise UnsupportedModelError(
                f"{layer.name} was put there or moved after apply, unknown to the policy; "
                "call attnplug.remove(model) and apply again"
            )
        now = layer.config._attn_implementation
        if layer.module in hooked and now not in ATTENTION_NAMES:
            raise UnsupportedModelError(
                f"{layer.name} was switched to attention {now!r} after apply, which bypasses the "
                "policy; call attnplug.remove(model) and apply again"
            )
    twice = slot_filled_twice(target) if hooked else ""
    if twice:
        raise UnsupportedModelError(
            f"{twice} since apply; call attnplug.remove(model) and apply again"
        )
    found = replace(ledger.report, last=last_calls(last_served(target)))
    why, fused, steps, kernels = last_call(target)
    if not (why or fused or steps or kernels):
        return found
    loop, fused = _loop_text(why) or found.loop, fused or found.fused
    return replace(found, loop=loop, fused=fused, steps=steps, kernels=kernels)


def _loop_text(why: str) -> str:
    return f"generate decodes with transformers' loop: {why}" if why else ""


def make_cache(model: torch.nn.Module, max_length: int) -> PlugCache:
    """An empty static cache of `max_length` tokens for a model that has a policy, with its
    methods' own state, for use without generate. Raises NotAppliedError, ArgumentError, and
    UnsupportedModelError where transformers cannot run the model on a static cache."""
    target = unwrap(model)
    ledger = ledger_of(target)
    if not isinstance(max_length, int) or isinstance(max_length, bool) or max_length < 1:
        raise ArgumentError(
            f"make_cache: max_length={max_length!r}, needs an integer of at least 1"
        )
    why = own_cache(target, ledger.indexed)
    if why:
        raise UnsupportedModelError(f"{why}; leave the cache to the model with use_cache=True")
    refuse_strangers(target)
    return PlugCache.for_config(target.config, max_length, ledger.make_layer)


def warm(
    model: torch.nn.Module,
    lengths: Sequence[int],
    batch: int = 1,
    *,
    padded: bool = False,
    **options: Any,
) -> dict[int, float]:
    """Compile ahead what generate will need on a model that has a policy, with a progress bar.

    Calls generate on `batch` rows of random tokens for each prompt length, padded on the left if
    `padded`. `options` go to generate, as a sampled call needs another step than a greedy one. One
    length below and one above a policy's crossover for such a batch serve all. Returns the seconds
    of each. Warns of a length that the model does not read. Raises NotAppliedError, and
    ArgumentError for a length or batch below 1.
    """
    target = unwrap(model)
    ledger_of(target)
    if not isinstance(lengths, Sequence):
        raise ArgumentError(f"warm: lengths={lengths!r}, needs a list of integers")
    for name, value in (("batch", batch), *(("lengths", length) for length in lengths)):
        if type(value) is not int or value < 1 + (padded and name == "lengths"):
            raise ArgumentError(f"warm: {name}={value!r}, needs integers of at least 1 (2 padded)")
    return generate_ahead(target, lengths, batch, padded, options)


class _Resolver:
    """Finds a layer's policy in what the user gave to `apply`."""

    def __init__(self, policy: Policies):
        entries = policy if isinstance(policy, Mapping) else {"*": policy}
        self.entries = [(key, parse(value)) for key, value in entries.items()]
        self.unused = [key for key, _ in self.entries]
        if not self.entries:
            raise PolicyError("the policy mapping is empty; give at least one layer a policy")
        named = [f"{_key_text(key)}: {value}" for key, value in self.entries]
        mapping = "{" + ", ".join(named) + "}"
        self.text = mapping if isinstance(policy, Mapping) else str(self.entries[0][1])

    def policy_for(self, layer: AttentionLayer) -> Policy | None:
        hits = [(key, policy) for key, policy in self.entries if _matches(key, layer)]
        for key, _ in hits:
            if key in self.unused:
                self.unused.remove(key)
        return hits[0][1] if hits else None

    def check_all_used(self, layers: list[AttentionLayer]) -> None:
        if self.unused:
            keys = ", ".join(_key_text(key) for key in self.unused)
            indices = [layer.index for layer in layers]
            raise PolicyError(
                f"no attention layer matches the policy mapping's {keys}; this model's layers are "
                f"{min(indices)} to {max(indices)}"
            )


def _key_text(key: LayerKey) -> str:
    if not isinstance(key, range):
        return str(key)
    return f"{key.start}-{key.stop - 1}" if key.step == 1 and key else str(key)


def _matches(key: LayerKey, layer: AttentionLayer) -> bool:
    if isinstance(key, int) and not isinstance(key, bool):
        return key == layer.index
    if isinstance(key, range):
        return layer.index in key
    if isinstance(key, str):
        span = re.fullmatch(r"(\d+)(?:-(\d+))?", key)
        if span:
            return int(span[1]) <= layer.index <= int(span[2] or span[1])
        return fnmatch.fnmatchcase(layer.name, key)
    raise PolicyError(
        f"policy mapping: the key {key!r} is a {type(key).__name__}; use a layer index, a range, "
        'a string such as "4-7", or a glob such as "*layers.3.*"'
    )


def _keeps_cache(model: PreTrainedModel, plan: Plan) -> str:
    """What the report says where generate prepares transformers' own cache, "" where ours."""
    if all(binding.policy is None for _, binding in plan):
        return "no layer has a policy: the model and its generate are transformers' own"
    # A static cache helps nobody where some layer cannot be told how much of it is valid.
    deaf = [layer.name for layer, _ in plan if not takes_cache(layer.module)]
    why = own_cache(model, [layer.module for layer, binding in plan if binding.policy])
    if deaf and not why:
        why = f"{deaf[0]} takes it by a name that attnplug does not know"
    return f"generate keeps transformers' dynamic cache: {why}" if why else ""


def _parallel(layers: list[AttentionLayer]) -> str:
    """The report's line on tensor parallelism: layers split alike are named once."""
    texts = dict.fromkeys(str(layer.split) for layer in layers if layer.split is not None)
    return f"tensor parallel: {'; '.join(texts)}" if texts else ""


def _report(layer: AttentionLayer, binding: Binding[Policy], *, static: bool) -> LayerReport:
    if binding.policy is None:
        dense = f"{binding.stock} (dense)"
        return LayerReport(layer.index, layer.name, layer.kind, dense, dense, binding.reason)
    prefill, decode = binding.policy.prefill, binding.policy.decode
    assert prefill is not None and decode is not None  # filled by Policy
    told = [f"{p.name}: {p.note(layer.shape)}" for p in (prefill, decode) if p.note(layer.shape)]
    notes = list(dict.fromkeys(told))
    if not static and type(decode).cache_layer is not Phase.cache_layer:
        notes.append(f"{decode.name}: runs dense, its state needs a static cache")
    if binding.policy.trace is not None:
        notes.append(f"traced by {binding.policy.trace}")
    notes += [binding.reason] if binding.reason else []
    return LayerReport(
        layer.index, layer.name, layer.kind, str(prefill), str(decode), "; ".join(notes)
    )


def _batching(plan: Plan) -> str:
    """What continuous batching serves otherwise than generate does, each once."""
    notes = [note for _, x in plan if x.policy is not None for note in x.policy.batching_notes]
    return f"continuous batching: {'; '.join(dict.fromkeys(notes))}" if notes else ""


def _length(model: PreTrainedModel, plan: Plan) -> str:
    """The report's line on methods that begin behind what the model can read, each once."""
    longest = positions(model.config)
    if longest is None:
        return ""
    notes: dict[str, None] = {}
    for layer, binding in plan:
        for slot in ("prefill", "decode"):
            method = getattr(binding.policy, slot, None)
            if isinstance(method, DenseBelow):
                notes |= dict.fromkeys(_too_late(slot, method, layer.shape.device, longest))
    told = f"this model reads {longest:,} tokens (its config's positions)"
    return f"length: {told}: {'; '.join(notes)}" if notes else ""


def _too_late(slot: str, method: DenseBelow, device: torch.device, longest: int) -> Iterator[str]:
    """What to say of a method that cannot serve one row of so many tokens, if anything."""
    rule = method.row_crossover(device)
    if rule.alone <= longest or rule.row >= NEVER:
        return
    what = "prompts" if slot == "prefill" else "caches"
    if slot == "prefill" or rule.row >= longest:
        yield f"{method.name} never serves here, as it needs {what} of {rule.alone:,}"
        return
    rows = -(-(rule.alone - rule.row) // (longest - rule.row))
    yield (
        f"{method.name} never serves a single row, as it needs {what} of {rule.alone:,}; "
        f"batches of {rows} rows and more reach its crossover"
    )


def _hooked(layer: AttentionLayer) -> tuple[PolicyHook, torch.nn.Module]:
    hook = PolicyHook(layer.index)
    hook.init_hook(layer.module)
    return hook, layer.module
