"""What serves each attention layer of a model, and what its config and caches must be for it."""

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from attnplug.models.cache import PlugLayer
from attnplug.models.hf import Binding
from attnplug.models.layers import INDEXED, AttentionLayer
from attnplug.models.names import (
    ADDITIVE_NAME,
    ATTENTION_NAME,
    ENTRIES_NAME,
    INDEXED_NAME,
    LATENT_NAME,
)
from attnplug.policies import Policy
from attnplug.policies._entries_layer import EntriesLayer
from attnplug.policies._promised import refusal_of, refuse

Plan = list[tuple[AttentionLayer, Binding[Policy]]]


def bind(
    model: PreTrainedModel, layer: AttentionLayer, policy: Policy | None, layers: int
) -> Binding[Policy]:
    """What serves a layer. `layers` like it are on its device."""
    stock = _stock_attention(model, layer)
    if layer.reason:
        return Binding(None, layer.reason, stock)
    if policy is None:
        return Binding(None, "the policy mapping names no policy for it", stock)
    policy, chosen = policy.resolve(layer.shape, layers)
    if layer.shape.indexed and not policy.attends_latents:
        why = "the model picks the tokens that it reads: the policy 'trained' serves it"
        return Binding(None, why, stock)
    if layer.shape.reads_latents and not policy.attends_all_latents:
        return Binding(None, "multi-head latent attention, which 'dense' alone serves", stock)
    for phase in (policy.prefill, policy.decode):
        refusal = refusal_of(phase, layer.shape) if phase is not None else None
        if refusal:
            return Binding(None, refusal, stock)
    untraced = refusal_of(policy.trace, layer.shape) if policy.trace is not None else None
    if untraced:
        reasons = "; ".join(filter(None, (chosen, f"not traced: {untraced}")))
        return Binding(replace(policy, trace=None), reasons, stock)
    return Binding(policy, chosen, stock)


def picks_tokens(layer: AttentionLayer, binding: Binding[Policy]) -> bool:
    """Whether a layer whose model picks what it reads has the method that serves it."""
    return layer.shape.indexed and binding.policy is not None


def keeps_latents(layer: AttentionLayer, binding: Binding[Policy]) -> bool:
    """Whether a layer that reads all of its latents has a method that serves it."""
    return layer.shape.reads_latents and binding.policy is not None


def all_or_none(plan: Plan) -> Plan:
    """The plan, without any policy where a layer whose model picks what it reads has none: such a
    layer looks into the config that all share, and must find the name that the model had."""
    left = next((x.name for x, b in plan if x.kind == INDEXED and b.policy is None), "")
    if not left:
        return plan
    why = f"{left} picks its tokens by itself, and shares its config with this layer"
    return [
        (x, replace(b, policy=None, reason=b.reason if b.policy is None else why)) for x, b in plan
    ]


def _stock_attention(model: PreTrainedModel, layer: AttentionLayer) -> str:
    """Which of the model's own dense attentions serves a layer that a policy does not."""
    if layer.shape.softcap or layer.shape.sinks:
        return "eager"  # sdpa has neither
    implementation = layer.config._attn_implementation
    if implementation in ("sdpa", "eager"):
        return implementation
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


def switched_names(plan: Plan) -> dict[int, str]:
    """The attention's new name for each config, by id, that has a layer with a policy."""
    served = {id(layer.config) for layer, binding in plan if binding.policy is not None}
    if any(layer.shape.entries for layer, binding in plan if picks_tokens(layer, binding)):
        return dict.fromkeys(served, ENTRIES_NAME)
    if any(picks_tokens(layer, binding) for layer, binding in plan):
        return dict.fromkeys(served, INDEXED_NAME)
    if any(keeps_latents(layer, binding) for layer, binding in plan):
        return dict.fromkeys(served, LATENT_NAME)
    eager = {id(layer.config) for layer, binding in plan if binding.stock == "eager"}
    return {key: ADDITIVE_NAME if key in eager else ATTENTION_NAME for key in served}


class LayerMaker:
    """Makes a layer's cache: its decode method's own where it has one."""

    def __init__(self, plan: Plan):
        self.policies = {layer.index: binding.policy for layer, binding in plan}
        self.heads = {layer.index: layer.shape.heads_q for layer, _ in plan}
        self.entries = {layer.index: layer.shape.entries for layer, _ in plan}
        full = [layer for layer, _ in plan if layer.kind == "full"]
        self.behind: dict[int, int] = {}
        for layer in full:
            alike = (x for x in full if x.shape.device == layer.shape.device)
            self.behind[layer.index] = sum(x.index > layer.index for x in alike)

    def __call__(self, index: int, max_length: int) -> PlugLayer:
        policy = self.policies.get(index)
        if policy is not None and policy.decode is not None:
            sizes = self.entries.get(index)
            if sizes is not None:
                layer = EntriesLayer(max_length, sizes)
            else:
                layer = policy.decode.cache_layer(max_length)
                if layer is not None and not isinstance(layer, PlugLayer):
                    refuse(policy.decode, "cache_layer", layer, "a PlugLayer or None")
            if layer is not None:
                layer.query_heads = self.heads[index]
                layer.layers_behind = self.behind.get(index, 0)
                return layer
        return PlugLayer(max_cache_len=max_length)

    def holds_more(self, rows: int, max_length: int, device: torch.device) -> bool:
        """Whether any layer of a cache with `rows` rows and room for `max_length` tokens keeps more
        than keys and values. One layer of each method is asked."""
        served = {id(p.decode): index for index, p in self.policies.items() if p is not None}
        layers = [self(index, max_length) for index in served.values()]
        return any(x.holds_more(rows, device) for x in layers if type(x) is not PlugLayer)
