"""prefill: one long prompt over several GPUs, in pieces of its sequence."""

import contextlib
import math
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from attnplug.api import Ledger, ledger_of
from attnplug.errors import (
    ArgumentError,
    AttnplugError,
    PolicyError,
    UnsupportedCallError,
    UnsupportedModelError,
)
from attnplug.models.agreement import Facts, agree, check_mesh, digest, fingerprint
from attnplug.models.cache import PlugCache
from attnplug.models.growth import GrowingCache, Growth
from attnplug.models.hf import binding_of
from attnplug.models.layers import AttentionLayer, find_attention_layers, has_own_slot, unwrap
from attnplug.models.names import ATTENTION_NAMES
from attnplug.models.parallel import tensor_parallel_group
from attnplug.models.pieces import Kept, NotesQueries, Pieces, Run, in_pieces
from attnplug.models.static import static_cache
from attnplug.policies import Policy

ROOM = 1024  # tokens that the cache has room for behind the prompt unless told otherwise


class Prefilled(NamedTuple):
    """What `prefill` gives every rank: a cache that holds the prompt, and the logits `[B,1,V]` of
    its last token."""

    cache: PlugCache
    logits: torch.Tensor


def prefill(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    mesh: DeviceMesh,
    decoder: torch.nn.Module | None = None,
    max_length: int | None = None,
) -> Prefilled:
    """Compute one prompt `[B,T]` (int64) on all ranks of a mesh; each rank takes two pieces of it.

    Every rank calls it with the same arguments. `model` is whole on each of them and has a policy
    whose prefill is dense or momo. Rows have no padding: `attention_mask`, if given, is all ones.
    `mesh` is a torch DeviceMesh of one dimension. The cache has room for `max_length` tokens (1,024
    more than the prompt unless told otherwise) and grows in generate. Without `decoder` it holds
    all KV heads on each rank. `decoder` is the same model split by tensor parallelism, with a
    policy of its own; the cache then holds its heads of this rank. `generate` of the decoder (or of
    the model) takes the prompt, the next token and this cache as `cache`, or as `past_key_values`
    before transformers 5.24.

    Raises on all ranks where one cannot take part: its own error there, RankError on the others.
    RankError is also raised where ranks were called with different things, or one has ended.
    """
    group = check_mesh(mesh).get_group()
    target, refused, plan = unwrap(model), None, None
    with _on_device(target.device):
        try:
            plan = _Plan.of(target, input_ids, attention_mask, mesh, decoder, max_length)
        except AttnplugError as error:
            refused = error
        agree(group, {} if plan is None else plan.facts, refused)
        assert plan is not None  # else it was refused, and `agree` has raised
        with torch.no_grad():
            return plan.run(input_ids.to(target.device))


def _on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class _Plan(NamedTuple):
    """A call that this rank can serve: the model, its run, and what all ranks must have alike."""

    model: PreTrainedModel
    made: Run
    facts: Facts

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        mesh: DeviceMesh,
        decoder: torch.nn.Module | None,
        max_length: int | None,
    ) -> "_Plan":
        """Raises an AttnplugError where this rank cannot serve the call."""
        ledger, layers = ledger_of(model), find_attention_layers(model)
        _check_prompt(ids, mask)
        _check_model(model, ledger, layers, mesh)
        length = ids.shape[1]
        room = length + ROOM if max_length is None else max_length
        if type(room) is not int or room < length:
            raise ArgumentError(
                f"prefill: max_length={room!r}, needs at least the prompt's {length}"
            )
        pieces = Pieces.of(length, mesh.size(), _grid(layers))
        reader = model if decoder is None else _decoder_of(model, unwrap(decoder), layers)
        made = Run(
            pieces,
            mesh.get_local_rank(),
            mesh.get_group(),
            _empty_cache(reader, room),
            _kept_by(model, reader),
            {layer.index: layer.kind for layer in layers},
            _wanting_queries(reader),
        )
        facts = {
            "prompt's shape": " x ".join(map(str, ids.shape)),
            "prompt": f"one of other tokens ({digest(ids)})",
            "model": f"{type(model).__name__} {model.dtype}, weights {fingerprint(model)}",
            "policy": ledger.report.policy,
            "max_length": str(room),
            "decoder": f"{type(reader).__name__} with {ledger_of(reader).report.policy}",
            "pieces": str(pieces.cuts),
        }
        return cls(model, made, facts)

    def run(self, ids: torch.Tensor) -> Prefilled:
        run = self.made
        at = run.pieces.positions(run.rank, ids.device)
        with in_pieces(self.model, run):
            logits = self.model(
                ids[:, at],
                position_ids=at.expand(len(ids), -1),
                use_cache=False,
                logits_to_keep=1,
            ).logits
            logits = run.from_first(logits[:, -1:].contiguous())
        return Prefilled(run.cache, logits)


def _check_prompt(ids: torch.Tensor, mask: torch.Tensor | None) -> None:
    if ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64) or 0 in ids.shape:
        raise ArgumentError(
            f"prefill: input_ids is {ids.dtype} of shape {tuple(ids.shape)}, needs token ids [B,T]"
        )
    if mask is not None and (mask.shape != ids.shape or not bool(mask.all())):
        raise UnsupportedCallError(
            "prefill: the attention mask hides tokens, and pieces of padded rows are not served. "
            "Prefill rows of one length, or one row at a time."
        )


def _check_model(
    model: PreTrainedModel, ledger: Ledger, layers: list[AttentionLayer], mesh: DeviceMesh
) -> None:
    """Raise where the model's forward pass is not one of tokens side by side, but for attention
    layers that this module serves."""
    if ledger.report.cache:
        raise UnsupportedModelError(f"prefill in pieces: {ledger.report.cache}")
    for layer in layers:
        why = _refusal(layer)
        if why:
            raise UnsupportedModelError(f"prefill in pieces: {layer.name}: {why}")
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    if [layer.index for layer in layers] != list(range(count)):
        raise UnsupportedModelError(
            f"prefill in pieces: {len(layers)} of the {count} layers of a {type(model).__name__} "
            "are attention layers with keys of their own; the others are not served"
        )
    devices = {tensor.device for tensor in model.parameters()}
    if devices != {model.device} or model.device.type != mesh.device_type:
        named = ", ".join(sorted(map(str, devices)))
        raise UnsupportedModelError(
            f"prefill in pieces: the model's parameters are on {named} and the mesh is one of "
            f"{mesh.device_type}; each rank needs all of the model on a device of its own"
        )
    shared = set(tensor_parallel_group(model)[0]) & set(mesh.mesh.tolist())
    if len(shared) > 1:
        raise UnsupportedModelError(
            f"prefill in pieces: the model's heads are split over ranks {sorted(shared)} of the "
            "mesh. Pass the whole model, and the split one as decoder=."
        )


def _refusal(layer: AttentionLayer) -> str:
    """Why this module cannot compute a layer in pieces, "" where it can."""
    binding = binding_of(layer.module)
    assert binding is not None  # the model has a policy
    if layer.reason and layer.kind != "sliding":
        return layer.reason
    if hasattr(layer.module, "kv_lora_rank") or not has_own_slot(layer.module):
        return "its keys are not those of the cache"
    if layer.config._attn_implementation not in ATTENTION_NAMES:
        return f"its attention is {layer.config._attn_implementation!r}, which bypasses the policy"
    if binding.trace_to is not None:
        return "a trace is being recorded"
    return ""


def _grid(layers: list[AttentionLayer]) -> int:
    """Queries at whose multiples the prefill of every layer may be cut."""
    grids = [1]
    for layer in layers:
        policy = _policy_of(layer)
        if policy is not None:
            assert policy.prefill is not None  # filled by Policy
            grid = policy.prefill.query_grid()
            if grid is None:
                raise PolicyError(
                    f"prefill in pieces: {layer.name} has the prefill method {policy.prefill}, "
                    "whose result depends on where a prompt is cut; dense and momo are served"
                )
            grids.append(grid)
    return math.lcm(*grids)


def _policy_of(layer: AttentionLayer) -> Policy | None:
    binding = binding_of(layer.module)
    return None if binding is None else binding.policy


def _decoder_of(
    model: PreTrainedModel, decoder: PreTrainedModel, layers: list[AttentionLayer]
) -> PreTrainedModel:
    """The decoder, if it can decode from what the model computes."""
    ledger = ledger_of(decoder)
    if ledger.report.cache:
        raise UnsupportedModelError(f"prefill: the decoder's {ledger.report.cache}")
    if len(tensor_parallel_group(model)[0]) > 1:
        raise UnsupportedModelError(
            "prefill: a decoder takes its heads from a whole model, and this one is split"
        )
    sides = (layers, find_attention_layers(decoder))
    looks = [[(x.index, x.kind, x.shape.head_dim, *_heads(x)) for x in side] for side in sides]
    if type(model) is not type(decoder) or looks[0] != looks[1] or model.dtype != decoder.dtype:
        raise ArgumentError(
            f"prefill: the decoder is another model: a {type(decoder).__name__} of "
            f"{len(looks[1])} layers in {decoder.dtype}, for a {type(model).__name__} of "
            f"{len(looks[0])} in {model.dtype}, or their layers differ"
        )
    return decoder


def _heads(layer: AttentionLayer) -> tuple[int, int]:
    """Query heads and KV heads, of all ranks together."""
    if layer.split is not None:
        return layer.split.heads_q, layer.split.heads_kv
    return layer.shape.heads_q, layer.shape.heads_kv


def _kept_by(model: PreTrainedModel, decoder: PreTrainedModel) -> Kept:
    """The heads of this rank of the decoder. All layers of a model are split alike."""
    split = find_attention_layers(decoder)[0].split
    if decoder is model or split is None or not split.by_heads:
        return Kept()
    _, rank = tensor_parallel_group(decoder)
    queries, keys = split.of_rank
    return Kept(slice(rank * keys, rank * keys + keys), slice(rank * queries, (rank + 1) * queries))


def _wanting_queries(decoder: PreTrainedModel) -> dict[int, NotesQueries]:
    """By layer, the decode methods that keep a prompt's last queries."""
    found: dict[int, NotesQueries] = {}
    for layer in find_attention_layers(decoder):
        policy = _policy_of(layer)
        if policy is not None and policy.decode is not None and policy.decode.keeps_queries:
            found[layer.index] = policy.decode
    return found


def _empty_cache(decoder: PreTrainedModel, length: int) -> PlugCache:
    """As generate would prepare it for the decoder."""
    config = decoder.config.get_text_config(decoder=True)
    growth = Growth(config, ledger_of(decoder).make_layer)
    return GrowingCache.begin(static_cache(config, length), growth)
