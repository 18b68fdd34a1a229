"""What happens while vLLM measures how much memory its cache may have: the state's share is held
back, and each method runs once on made-up keys, so that its workspace is in the measured peak and
Triton has compiled its kernels before the first request."""

from typing import Any

import torch
from vllm.logger import init_logger

from attnplug.ops.common.checks import FP8
from attnplug.serve.paged.state import share_of_cache

logger = init_logger("vllm.attnplug")


def prepare(impl: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Hold back the memory of all layers' state and run their methods, once a process."""
    if impl.profiled:
        return
    layers = impl.config.compilation_config.static_forward_context
    impls = {name: layer.impl for name, layer in layers.items() if hasattr(layer, "impl")}
    own = {name: other for name, other in impls.items() if isinstance(other, type(impl))}
    for other in own.values():
        other.profiled = True
    served = {name: other.served(name, device) for name, other in own.items()}
    if device.type == "cuda":
        _hold(impl.config, own, served, device)
    warmed: set[Any] = set()
    for name, other in own.items():
        shape = other.num_heads, other.num_kv_heads, other.head_size
        kind = shape, other.fp8, served[name].phases
        if kind not in warmed:
            warmed.add(kind)
            _warm(other, served[name], dtype, device)


def _hold(config: Any, own: dict[str, Any], served: dict[str, Any], device: torch.device) -> None:
    """Reserve the state's part of what the server's budget leaves for keys and values. What the
    profile run needs besides is in that too, so that the part is rather too large."""
    shares = {}
    for name, layer in served.items():
        if layer.state is not None:
            width, phase = own[name].head_size, layer.phases.decode
            dtype = FP8 if own[name].fp8 else config.model_config.dtype
            shares[name] = share_of_cache(phase, width, dtype)
    if not shares:
        return
    if config.cache_config.kv_cache_memory_bytes:
        logger.warning(
            "attnplug: with --kv-cache-memory-bytes vLLM measures nothing; what the method that "
            "decodes keeps takes memory on top of it"
        )
        return
    total = torch.cuda.get_device_properties(device).total_memory
    budget = total * config.cache_config.gpu_memory_utilization
    left = max(0.0, budget - torch.cuda.memory_allocated(device))
    each = left / (len(own) + sum(shares.values()))  # of a layer's keys and values
    for name, share in shares.items():
        served[name].state.reserve(int(each * share), device)
    held = each * sum(shares.values()) / 2**30
    logger.info("attnplug: %.2f GiB are held beside the cache", held)


def most_rows(config: Any) -> int:
    """The most rows of a batch of steps, those included that pad it for a CUDA graph."""
    graphs = config.compilation_config.max_cudagraph_capture_size or 0
    return max(config.scheduler_config.max_num_seqs, graphs)


def _warm(impl: Any, served: Any, dtype: torch.dtype, device: torch.device) -> None:
    config, scheduler = impl.config, impl.config.scheduler_config
    longest = config.model_config.max_model_len
    shape = dict(
        heads=impl.num_heads,
        kv_heads=impl.num_kv_heads,
        head_dim=impl.head_size,
        dtype=dtype,
        device=device,
    )
    served.warm_prompts(min(scheduler.max_num_batched_tokens, longest), longest, **shape)
    page = config.cache_config.block_size
    served.warm_steps(scheduler.max_num_seqs, longest, page=page, fp8=impl.fp8, **shape)
