"""Multi-head latent attention as transformers has it: how latents are expanded, which is compared
instruction for instruction (see known_code.py), and the end of a forward, statement for statement
as ast.unparse writes it. Before that end families differ: in norms, rotary embeddings and gates.
"""

import functools
import re
from typing import Any

import torch

from attnplug.models.known_code import same_code
from attnplug.models.names import CACHE
from attnplug.models.own_code import own_code
from attnplug.models.rewritten import body_of

UPDATE = (
    f"if {CACHE} is not None:\n"
    f"    {{pair}} = {CACHE}.update({{pair}}, self.layer_idx, kwargs=kwargs)"
)
EXPAND = re.compile(r"key_states, value_states = self\.expand_kv\((\w+, \w+)\)")
CALL = re.compile(
    r"attn_output, attn_weights = attention_interface\(self, query_states, key_states, "
    r"value_states, attention_mask, dropout=0\.0 if not self\.training else "
    r"self\.attention_dropout, scaling=self\.scaling, (position_ids=position_ids, )?\*\*kwargs\)"
)
BETWEEN = "query_states = ", "attention_interface: Callable = "  # where such statements begin


def expand_kv(
    self: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As in transformers, where it has a docstring."""
    batch_size, _, seq_length, _ = kv_nope.shape
    key_shape = (batch_size, seq_length, -1, self.qk_nope_head_dim + self.v_head_dim)

    kv_nope = self.kv_b_proj(kv_nope).view(key_shape).transpose(1, 2)
    k_nope, value_states = torch.split(kv_nope, [self.qk_nope_head_dim, self.v_head_dim], dim=-1)
    k_rot = k_rot.expand(-1, k_nope.shape[1], -1, -1)

    key_states = kv_nope.new_empty(
        *kv_nope.shape[:-1], self.qk_nope_head_dim + self.qk_rope_head_dim
    )
    key_states[..., : self.qk_nope_head_dim].copy_(k_nope)
    key_states[..., self.qk_nope_head_dim :].copy_(k_rot)
    return key_states, value_states


def expands_as_known(kind: type[torch.nn.Module]) -> bool:
    """Whether an attention class makes keys and values of latents as above."""
    return same_code(getattr(kind, "expand_kv", None), expand_kv)


def ends_as_known(kind: type[torch.nn.Module]) -> bool:
    """Whether the forward of an attention class updates the cache with latents, and uses what
    `expand_kv` makes of them for a plain call of its attention function and nothing else."""
    return _ends_as_known(own_code(kind.forward))


@functools.cache
def _ends_as_known(forward: Any) -> bool:
    found = body_of(forward)
    if found is None:
        return False
    texts = found[1]
    expands = [(i, found[1]) for i, text in enumerate(texts) if (found := EXPAND.fullmatch(text))]
    calls = [i for i, text in enumerate(texts) if CALL.fullmatch(text)]
    if len(expands) != 1 or len(calls) != 1:
        return False
    (expand, pair), call = expands[0], calls[0]
    update = UPDATE.format(pair=pair)
    begin = texts.index(update) if update in texts else call
    between = [text for i, text in enumerate(texts[:call]) if i > begin and i != expand]
    used = re.compile(r"\b(key_states|value_states|attention_mask)\b")
    others = [text for i, text in enumerate(texts) if i not in (expand, call)]
    return (
        begin < expand < call
        and all(text.startswith(BETWEEN) for text in between)
        and not any(used.search(text) for text in others)
    )
