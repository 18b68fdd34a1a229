"""Tensors of a cache that stay where they are."""

import torch
from transformers.cache_utils import StaticLayer

from attnplug.models.sync import may_sync


def mark_buffer(tensor: torch.Tensor, any_length: bool) -> None:
    """Tell torch.compile that a buffer does not move, which CUDA graphs want, and, for
    `any_length`, that its third dimension has another size in other caches: code compiled once
    serves all. Traced code cannot say it, and does not."""
    if torch.compiler.is_compiling():
        return
    torch._dynamo.mark_static_address(tensor)
    if any_length and tensor.dim() > 2:
        torch._dynamo.maybe_mark_dynamic(tensor, 2)


def count_on(layer: StaticLayer, device: torch.device) -> None:
    """Have a layer count its tokens on a device. transformers copies the count from the host, which
    waits for all that the GPU has been given: in a prefill that is the layers before. It cannot
    copy that of a layer that was made inside `torch.device("meta")`, which holds no token yet."""
    count = layer.cumulative_length
    if torch.compiler.is_compiling() or count.device.type == device.type:
        return
    if count.is_meta or (count.is_cpu and device.type == "cuda"):
        held = 0 if count.is_meta else int(count)
        layer.cumulative_length = torch.full((), held, dtype=count.dtype, device=device)


def count_down(counts: list[torch.Tensor], tokens: int | torch.Tensor) -> None:
    """Take `tokens` from counts `[]` of a device, down to 0, all of them by one kernel."""
    if isinstance(tokens, torch.Tensor):
        torch._foreach_add_(counts, tokens, alpha=-1)  # pyright: ignore[reportPrivateImportUsage]
    else:
        torch._foreach_sub_(counts, tokens)  # pyright: ignore[reportPrivateImportUsage]
    torch._foreach_clamp_min_(counts, 0)  # pyright: ignore[reportPrivateImportUsage]


def lower_progress(progresses: list[torch.Tensor], length: torch.Tensor, block: int) -> None:
    """Have no more blocks done than `length` `[]` tokens fill, in each of `progresses` `[B,2]`,
    int32: how many leading blocks are done, and the first token that they are counted from. A few
    kernels for all."""
    starts = torch.stack([each[:, 1] for each in progresses])
    whole = ((length - starts).clamp(min=0) // block).to(starts.dtype)
    done = [each[:, 0] for each in progresses]
    torch._foreach_minimum_(done, list(whole))  # pyright: ignore[reportPrivateImportUsage]


def prompt_on_gpu(
    layer: StaticLayer, key_states: torch.Tensor, value_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a prefill that just wrote these tokens attends to, in the GPU's own memory where a
    layer's buffers are the host's: the new tokens where there are no others."""
    keys, values = layer.keys, layer.values
    assert keys is not None and values is not None  # the tokens are in them
    if not may_sync(key_states.is_cuda):
        return keys.clone(), values.clone()
    tokens = int(layer.cumulative_length)
    if tokens == key_states.shape[2]:
        return key_states, value_states
    return keys[:, :, :tokens].clone(), values[:, :, :tokens].clone()
