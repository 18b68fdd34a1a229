"""Greedy replies to a batch of prompts, by the model itself and by policies. Policies that share a
prefill method share the prefill, where their caches can take it over from each other: it is handed
on to each one's own decode."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from transformers.generation.configuration_utils import CompileConfig

from attnplug.api import applied, make_cache
from attnplug.eval.served import Served, ServedBy, who_served
from attnplug.eval.steps import own_steps
from attnplug.models.cache import PlugCache
from attnplug.models.decode_loop import CAPTURE
from attnplug.models.generate import LOOP, own_cache
from attnplug.models.layers import find_attention_layers as layers_of
from attnplug.models.loop_calls import unserved_model
from attnplug.models.names import CACHE
from attnplug.policies import Phase, Policy


class Batch(NamedTuple):
    """Left-padded prompts on the model's device: ids and mask `[B,T]`, tokens to add, padding."""

    ids: torch.Tensor
    mask: torch.Tensor
    new_tokens: int
    pad: int


@torch.inference_mode()
def replies(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[torch.Tensor],
    policies: Mapping[str, Policy | None],
    new_tokens: int,
    served: ServedBy | None = None,
) -> dict[str, list[str]]:
    """Replies to prompts `[1,T]` for each policy by its name; None is the model without one.
    `served` takes who served each."""
    batch = _batch(model, tokenizer, prompts, new_tokens)
    noted: ServedBy = {} if served is None else served
    texts: dict[str, list[str]] = {}

    def prefill_of(name: str) -> str:
        policy = policies[name]
        if policy is None:
            return ""
        return str(policy.prefill) if _takes_over(policy.decode) else f"{policy.prefill} of {name}"

    for prefill, group in groupby(sorted(policies, key=prefill_of), key=prefill_of):
        names = list(group)
        if prefill and len(names) > 1:
            tokens = _after_one_prefill(model, batch, {n: policies[n] for n in names}, noted)
        else:
            tokens = {
                name: _alone(model, batch, policies[name], noted.setdefault(name, {}))
                for name in names
            }
        for name in names:
            texts[name] = [_text(model, tokenizer, row) for row in tokens[name].cpu()]
    return {name: texts[name] for name in policies}


def _takes_over(method: Any) -> bool:
    """Whether a decode method's cache can take over another's prefill, as attnplug's own can. What
    another's `note_queries` keeps of a prompt does not follow from its tokens."""
    own = type(method).__module__.startswith("attnplug.")
    return own or type(method).note_queries is Phase.note_queries


def _batch(model: Any, tokenizer: Any, prompts: Sequence[torch.Tensor], new_tokens: int) -> Batch:
    longest = max(ids.shape[1] for ids in prompts)
    pad = tokenizer.pad_token_id
    ids = torch.full((len(prompts), longest), pad, dtype=torch.int64, device="cpu")
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - prompt.shape[1] :] = prompt[0]
        mask[row, longest - prompt.shape[1] :] = 1
    return Batch(ids.to(model.device), mask.to(model.device), new_tokens, pad)


def _alone(
    model: Any,
    batch: Batch,
    policy: Policy | None,
    served: Served | None = None,
) -> torch.Tensor:
    if policy is not None:
        with applied(model, policy, fuse=False):  # only attention differs from the model's own
            tokens = _generate(model, batch)
            if served is not None:
                served |= who_served(model)
            return tokens
    if own_cache(model) or unserved_model(model, [each.kind for each in layers_of(model)]):
        parts = [_generate(model, part) for part in _rows(batch)]
        new = max(part.shape[1] for part in parts)
        pad = torch.nn.functional.pad
        return torch.cat([pad(part, (0, new - part.shape[1]), value=batch.pad) for part in parts])
    return _own_greedy(model, batch)


def _own_greedy(model: Any, batch: Batch) -> torch.Tensor:
    """New tokens `[B,N]` of the model without a policy, also those after a reply's end."""
    room = batch.ids.shape[1] + batch.new_tokens
    logits, steps = own_steps(model, [part.ids for part in _rows(batch)], room)
    tokens = [logits.argmax(-1, keepdim=True)]
    while len(tokens) < batch.new_tokens:
        tokens.append(steps.logits(tokens[-1]).argmax(-1, keepdim=True))
    return torch.cat(tokens, 1)


def _after_one_prefill(
    model: Any, batch: Batch, policies: Mapping[str, Any], served: ServedBy
) -> dict[str, torch.Tensor]:
    """New tokens `[B,N]` of policies that differ in their decode only."""
    # The first that keeps a prompt's queries, if there is one, hands them on with its cache.
    first = max(policies.values(), key=lambda policy: policy.decode.keeps_queries)
    drafts = max(policy.rounds() for policy in policies.values())  # behind the last token
    length = batch.ids.shape[1] + batch.new_tokens + drafts
    with applied(model, first):
        source = make_cache(model, length)
        logits = model(
            batch.ids,
            attention_mask=batch.mask,
            position_ids=(batch.mask.cumsum(-1) - 1).clamp(min=0),
            logits_to_keep=1,
            **{CACHE: source},
        ).logits
        prefilled = who_served(model)
    token = logits[:, -1].argmax(-1, keepdim=True)
    seen = torch.cat([batch.mask, torch.ones_like(token)], 1)
    then = Batch(torch.cat([batch.ids, token], 1), seen, batch.new_tokens - 1, batch.pad)
    tokens = {}
    for name, policy in policies.items():
        with applied(model, policy, fuse=False):
            cache = make_cache(model, length)
            cache.adopt(source)
            tokens[name] = torch.cat([token, _generate(model, then, cache)], 1)
            served[name] = prefilled | who_served(model)
    return tokens


def _rows(batch: Batch) -> Iterator[Batch]:
    """Each row as a batch of its own, without what pads it: of padded rows stock attention makes
    masks `[B,1,T,T]`."""
    for ids, mask in zip(batch.ids.split(1), batch.mask.split(1), strict=True):
        first = int(mask.argmax(-1))
        yield batch._replace(ids=ids[:, first:], mask=mask[:, first:])


def _generate(model: Any, batch: Batch, cache: PlugCache | None = None) -> torch.Tensor:
    """New tokens `[B,N]`. The cache has seen all of the batch but its last token."""
    if batch.new_tokens == 0:
        return batch.ids[:, :0]
    out = model.generate(
        batch.ids,
        attention_mask=batch.mask,
        max_new_tokens=batch.new_tokens,
        do_sample=False,
        num_beams=1,
        pad_token_id=batch.pad,
        **{CACHE: cache},
        **uncompiled(model),
    )
    return out[:, batch.ids.shape[1] :]


def uncompiled(model: Any) -> dict[str, Any]:
    """Options of generate that leave each step the model's own code, captured on a GPU."""
    if model.device.type == "cuda" and vars(model).get(LOOP) is not None:
        return {"compile_config": CompileConfig(backend=CAPTURE)}
    return {"disable_compile": True}


def _text(model: Any, tokenizer: Any, tokens: torch.Tensor) -> str:
    """The text of new tokens `[N]` up to the first that ends a reply."""
    ends = model.generation_config.eos_token_id
    ends = torch.tensor([] if ends is None else ends, dtype=torch.int64, device="cpu").reshape(-1)
    over = torch.isin(tokens, ends).nonzero()
    whole = tokens[: int(over[0])] if len(over) else tokens
    return tokenizer.decode(whole, skip_special_tokens=True)
