"""What kernels of a layer stand in for: the code that Llama and Gemma have in transformers, and
most families after them. A module's code is compared with it instruction for instruction, so that
it is written here as it is written there. transformers' own functions would not do: a user who
replaces them, for all models of a process, would change both sides of the comparison.
"""

from types import CodeType, FunctionType
from typing import Any

import torch

from attnplug.models.own_code import own_code


def same_code(function: Any, other: Any) -> bool:
    """Whether two functions do the same, instruction for instruction. What is no function of
    Python, as hub kernels make of some, is like nothing that is known."""
    codes = _code(function), _code(other)
    return None not in codes and codes[0] == codes[1]


def _code(function: Any) -> tuple[Any, ...] | None:
    """What a function does, without its name, place and annotations; None of what is no function
    of Python."""
    inner = own_code(function)
    if not isinstance(inner, FunctionType):
        return None
    code: CodeType = inner.__code__
    constants = tuple(each for each in code.co_consts if each != inner.__doc__)
    return code.co_code, constants, code.co_names, code.co_varnames, inner.__defaults__


def llama_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)


def gemma_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    output = self._norm(x.float())
    output = output * (1.0 + self.weight.float())
    return output.type_as(x)


def gemma_norm_of(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def llama_mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """As in transformers, where it has a docstring."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """As in transformers, where it has a docstring."""
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed
