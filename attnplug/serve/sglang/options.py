"""What a server is asked to run, and what is refused at start. SGLang has no option for plugins:

    ATTNPLUG_POLICY="momo+gather"
    ATTNPLUG_POLICY='{"policy": "momo+gather", "layers": {"0-1": "dense"}}'

SGLang's processes inherit the environment variable.
"""

import os
from typing import Any

import torch

from attnplug.errors import ServeError
from attnplug.files import json_of
from attnplug.ops.common.checks import FP8
from attnplug.policies import Gather, Phase
from attnplug.serve.paged import phases as paged
from attnplug.serve.paged.phases import VARIABLE, Engine, ServedPolicy, fp8_refusal, unserved

SGLANG = Engine(
    "SGLang",
    VARIABLE,
    f"set {VARIABLE}=momo+gather",
    "--enable-hierarchical-cache and its own backends",
    "momo for prefill and gather for decode",
    {
        "certified": "--kv-cache-dtype fp8_e4m3 with SGLang's own backend",
        "sketch": "gather, whose ops read SGLang's pages",
        "gvr": "gather, whose summaries take a small part of the cache's memory",
        "auto": "the methods by name, such as 'momo+gather'",
        "stream": "attnplug.trace.record in transformers",
        "trained": "SGLang's own kernels for models with an indexer, without attnplug",
    },
)
BACKEND = "attnplug"  # what --attention-backend calls it
DTYPES = (torch.bfloat16, torch.float16, torch.float32, FP8)  # of a cache
CACHES = ("auto", "bf16", "bfloat16", "fp8_e4m3")  # of --kv-cache-dtype
POOLS = ("MHATokenToKVPool", "SWAKVPool")  # whose pages hold keys and values as they are
CARDS = (8, 9)  # major compute capabilities for which SGLang has FlashAttention 3
OWN = "use SGLang's own --attention-backend fa3"


def policy_of() -> ServedPolicy:
    """The policy in the environment. Raises ServeError or PolicyError."""
    return read_policy(os.environ.get(VARIABLE) or None)


def read_policy(given: Any) -> ServedPolicy:
    """The policy that a string describes, or its JSON. Raises ServeError or PolicyError."""
    if given is not None and given.lstrip().startswith("{"):
        try:
            given = json_of(given)
        except ValueError as error:
            raise SGLANG.error(f"{VARIABLE} is {given!r}, which is no JSON ({error})") from error
    policy = paged.read_policy(given, SGLANG)
    for phases in policy.all_phases:
        for phase in (phases.trace, phases.decode):
            if phase is not None and not isinstance(phase, Gather):
                raise unserved(phase, SGLANG)
    return policy


def check_server(server: Any, policy: ServedPolicy) -> None:
    """Raise ServeError for a server whose other options a sparse phase cannot live with. `server`
    has SGLang's arguments, resolved."""
    for asked, message in _conflicts(server, policy):
        if asked:
            raise SGLANG.error(message)


def _conflicts(server: Any, policy: ServedPolicy) -> list[tuple[Any, str]]:
    prefill = server.prefill_attention_backend or server.attention_backend
    decode = server.decode_attention_backend or server.attention_backend
    both = {prefill, decode} == {BACKEND}
    return [
        (
            not both and (prefill != BACKEND or policy.decode is not None),
            f"prefill is {prefill}'s and decode {decode}'s; gather must see each key that is "
            f"written, and momo the prompts: use --attention-backend {BACKEND} for both",
        ),
        *_unserved_modes(server),
        *_caches(server),
    ]


def _unserved_modes(server: Any) -> list[tuple[Any, str]]:
    graphs = server.cuda_graph_config
    return [
        (
            server.speculative_algorithm is not None,
            "speculative decoding gives rows several queries, which is not served; drop "
            f"--speculative-algorithm, or {OWN}",
        ),
        (
            server.dllm_algorithm is not None,
            f"a diffusion language model rewrites its keys; drop --dllm-algorithm, or {OWN}",
        ),
        (
            server.disaggregation_mode != "null",
            "disaggregated prefill and decode fill pages that gather knows nothing of; drop "
            f"--disaggregation-mode, or {OWN}",
        ),
        (
            server.enable_dp_attention or server.attn_dp_size > 1,  # resolved, only the second
            "data-parallel attention pads a rank's batches for the others, which is not tested; "
            "use --tp-size, which splits heads, or drop --attn-dp-size and --enable-dp-attention",
        ),
        (
            server.dcp_size > 1 or server.attn_cp_size > 1,
            "context parallelism splits a row's pages over GPUs; use --tp-size, which splits heads",
        ),
        (
            server.enable_two_batch_overlap or server.enable_pdmux,
            "a batch that is cut in two, or computed layer by layer, is not served; drop "
            "--enable-two-batch-overlap and --enable-pdmux",
        ),
        (
            server.enable_torch_compile,
            "torch.compile would trace the backend, whose prompts look at lengths on the host; "
            "drop --enable-torch-compile",
        ),
        (
            graphs is not None and graphs.prefill.backend == "full",
            "a full CUDA graph of prefill records attention, and momo looks at lengths on the "
            "host; use --cuda-graph-backend-prefill breakable",
        ),
    ]


def _caches(server: Any) -> list[tuple[Any, str]]:
    tiers = server.enable_hierarchical_cache or server.enable_lmcache or server.enable_flexkv
    return [
        (
            tiers or server.radix_cache_backend is not None,
            "a cache in several tiers fills pages that gather knows nothing of; drop "
            "--enable-hierarchical-cache, --enable-lmcache, --enable-flexkv and "
            "--radix-cache-backend",
        ),
        (
            server.enable_unified_memory or server.enable_kv_cache_sharding,
            "pages that move in memory, or are spread over GPUs, lose their summaries; drop "
            "--enable-unified-memory and --enable-kv-cache-sharding",
        ),
        (
            server.enable_hisparse,
            "--enable-hisparse chooses keys itself; drop it, or attnplug",
        ),
        (
            server.prefill_only_disable_kv_cache,
            f"no keys are cached; drop --prefill-only-disable-kv-cache, or {OWN}",
        ),
    ]


def check_cache(name: str, policy: ServedPolicy, dtype: torch.dtype | None = None) -> None:
    """Raise ServeError for a cache of this `--kv-cache-dtype` that the policy cannot read. `dtype`
    is that of the keys once SGLang has chosen it."""
    if name not in CACHES if dtype is None else dtype not in DTYPES or name == "mxfp8":
        raise SGLANG.error(
            f"the cache's keys are {dtype or name} (--kv-cache-dtype {name}), and attnplug reads "
            "them in 16 bits or in fp8_e4m3 with one scale for a layer; use one of these, or "
            f"{OWN}"
        )
    fp8 = name == "fp8_e4m3" if dtype is None else dtype == FP8
    if fp8 and (why := fp8_refusal(policy)):
        raise SGLANG.error(f"--kv-cache-dtype {name}: {why}")


def check_model(runner: Any, policy: ServedPolicy) -> None:
    """Raise ServeError for a model or a cache that cannot be served. `runner` is SGLang's model
    runner, its pools made."""
    check_cache(runner.kv_cache_dtype_str, policy, runner.kv_cache_dtype)
    pool, layers = runner.token_to_kv_pool, runner.model_config.num_hidden_layers
    for asked, message in [
        (
            policy.farthest >= layers,
            f"layers names layer {policy.farthest}, and the model's are 0 to {layers - 1}",
        ),
        (
            runner.use_mla_backend,
            "the model keeps latents instead of keys (MLA); use SGLang's own MLA backends",
        ),
        (
            runner.model_config.is_encoder_decoder,
            f"the model has an encoder, whose keys stand among the prompt's; {OWN}",
        ),
        (
            type(pool).__name__ not in POOLS,
            f"the cache is a {type(pool).__name__}, and pages are read of {' and '.join(POOLS)}; "
            f"{OWN}",
        ),
        (
            pool.post_capture_active,
            "the cache gets its memory after CUDA graphs are captured, and gather's summaries need "
            "its size; unset SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",
        ),
    ]:
        if asked:
            raise SGLANG.error(message)


def check_card(capability: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> None:
    """Raise ServeError for a GPU on which SGLang has no FlashAttention 3 to serve dense rows over a
    cache of this dtype."""
    major, minor = capability
    if dtype == FP8 and major < 9:
        raise SGLANG.error(
            "dense rows are SGLang's FlashAttention 3's, which reads an fp8 cache on Hopper alone, "
            f"and this GPU has compute capability {major}.{minor}; use --kv-cache-dtype auto, or "
            "bf16 where the checkpoint asks for fp8"
        )
    if major not in CARDS:
        raise SGLANG.error(
            f"dense rows are SGLang's FlashAttention 3's, which has no kernels for compute "
            f"capability {major}.{minor}; use an Ampere, Ada or Hopper GPU, or SGLang's own backend"
        )


def page_for(phase: Phase) -> int:
    """A page's size that holds the method's blocks."""
    return max(64, getattr(phase, "block", 1))


def page_error(phase: Phase, page: int) -> ServeError | None:
    """Why pages of so many keys cannot hold the method's blocks, None where they can."""
    block = getattr(phase, "block", 1)
    if page % block == 0:
        return None
    return SGLANG.error(
        f"{phase} decodes by blocks of {block} keys, and a page has {page}; add --page-size "
        f"{page_for(phase)}"
    )
