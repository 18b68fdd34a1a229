"""Tiny models whose layers pick their tokens, or blocks of them, by an indexer, of every family
that has them."""

from typing import Any

import pytest
import torch
import transformers
from every_family import KINDS, SIZES, build
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel


def since(is_there: bool, version: str) -> pytest.MarkDecorator:
    """Of tests that want a family as it is from a version of transformers on: in an older one its
    layers are left to the model."""
    has = is_there and Version(transformers.__version__) >= Version(version)
    return pytest.mark.skipif(not has, reason=f"wants the family of transformers {version}")


FAMILIES = [
    kind
    for kind in ("deepseek_v32", "glm_moe_dsa", "axk2", "dots3_note_text", "hy_v4")
    if kind in KINDS
]
HAS_MISTRAL = hasattr(transformers, "MistralLarge4ForConditionalGeneration")
# Latents that layers share, picks that they share, and layers without rotary embedding.
MISTRAL: list[dict[str, Any]] = [
    {},
    {
        "kv_source_layers": [0, 1, 1, 1],
        "indexer_types": ["full", "shared", "full", "shared"],
        "no_rope_layers": [1, 0, 0, 0],
    },
]
# Blocks that each KV head picks: layers among full ones, and no block that is always there.
M3 = "minimax_m3_vl_text"
SPARSE = "minimax_m3_sparse"
MINIMAX: list[dict[str, Any]] = [
    {},
    {"layer_types": ["full_attention", SPARSE, "full_attention", SPARSE], "index_local_blocks": 0},
    {"index_local_blocks": 2, "num_attention_heads": 2},
]

# Pools of tokens, beside linear layers: picks that layers share, and no tail.
HAS_GLM5 = hasattr(transformers, "Glm5NextForConditionalGeneration")
PICKING, LINEAR = "indexed_attention", "linear_attention"
GLM5: list[dict[str, Any]] = [
    {},
    {"layer_types": [PICKING, LINEAR] * 2, "index_kpool_always_select_tail": False},
]


def tiny_glm5(**options: Any) -> PreTrainedModel:
    """GLM-5.3, whose queries read 4 of the pools of 4 tokens, and the tokens behind the last."""
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

    kind = Glm5NextConfig.sub_configs["text_config"]
    known = {*vars(kind()), *dir(kind), *kind.attribute_map} - {"layer_types", "mlp_layer_types"}
    sizes = {name: value for name, value in SIZES.items() if name in known}
    sizes |= {
        "num_key_value_heads": 2,
        "qk_rope_head_dim": 0,
        "index_topk": 16,
        "index_kpool": 4,
        "layer_types": [PICKING, LINEAR, PICKING, PICKING],
        "indexer_types": ["full", "full", "full", "shared"],
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "linear_head_dim": 16,
        "linear_num_heads": 2,
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 32,
        "out_hidden_size": 128,
        "projection_intermediate_size": 32,
    }
    config = Glm5NextConfig(
        text_config=sizes | options, vision_config=vision, image_token_id=1, video_token_id=2
    )
    return drawn(Glm5NextForConditionalGeneration, config)


def tiny_minimax(**options: Any) -> PreTrainedModel:
    """MiniMax-M3's text model, which reads 2 of its blocks of 16 tokens."""
    sizes: dict[str, Any] = {
        "layer_types": [SPARSE] * 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "index_n_heads": 2,
        "index_block_size": 16,
        "index_topk_blocks": 2,
        "dense_intermediate_size": 64,
        "shared_intermediate_size": 64,
    }
    return build(M3, **(sizes | options))


# Blocks of tokens by their compressed keys, for all KV heads.
QWEN = "qwen4_exp_text"
POOLED = "indexed_attention"
QWENS: list[dict[str, Any]] = [
    {},
    {"layer_types": [POOLED] * 4},
    {"layer_types": [POOLED, "linear_attention", "linear_attention", POOLED]},
    {"indexer_compress_ratio": 3, "indexer_budget": 9, "num_attention_heads": 2},
]


def tiny_qwen(**options: Any) -> PreTrainedModel:
    """Qwen4-Exp's text model, which reads 2 of its blocks of 4 tokens and those behind the last."""
    sizes: dict[str, Any] = {
        "layer_types": ["linear_attention", POOLED] * 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "indexer_head_dim": 48,
    }
    return build(QWEN, **(sizes | options))


# Windows of tokens and compressed entries: layers of each kind among sliding ones, and rates that
# the window is no multiple of.
V4 = "deepseek_v4"
SLIDING = "sliding_attention"
HEAVY, SPARSE4 = "heavily_compressed_attention", "compressed_sparse_attention"
V4S: list[dict[str, Any]] = [
    {},
    {"layer_types": [HEAVY] * 4},
    {"layer_types": [SPARSE4] * 4, "index_topk": 1},
    {"compress_rates": {SPARSE4: 3, HEAVY: 7}, "sliding_window": 5, "num_attention_heads": 4},
]


def tiny_v4(**options: Any) -> PreTrainedModel:
    """DeepSeek-V4, whose sparse layers read 3 of their entries of 4 tokens, its heavy ones all of
    8, and all of its layers a window of 16."""
    sizes: dict[str, Any] = {
        "layer_types": [SLIDING, SPARSE4, HEAVY, SPARSE4],
        "compress_rates": {SPARSE4: 4, HEAVY: 8},
        "index_topk": 3,
        "o_groups": 2,
        "o_lora_rank": 32,
    }
    model = build(V4, **(sizes | options))
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("sinks"):
            weight.data.normal_()
        elif name.endswith("tid2eid"):
            weight.data.random_(model.config.n_routed_experts)
    return model


def tiny_mistral(**options: Any) -> PreTrainedModel:
    """Mistral Large 4 with a text model of four layers."""
    from transformers import (
        MistralLarge4Config,
        MistralLarge4ForConditionalGeneration,
        PixtralVisionConfig,
    )

    kind = MistralLarge4Config.sub_configs["text_config"]
    known = {*vars(kind()), *dir(kind), *kind.attribute_map}
    lists = {"layer_types", "mlp_layer_types", "indexer_types"}
    sizes = {name: value for name, value in SIZES.items() if name in known - lists}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    sizes |= {"num_key_value_heads": 2, "head_dim": 32, "rope_parameters": rope}
    vision = PixtralVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=16,
        image_size=32,
        patch_size=16,
    )
    config = MistralLarge4Config(text_config=kind(**(sizes | options)), vision_config=vision)
    return drawn(MistralLarge4ForConditionalGeneration, config)


def drawn(kind: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """A model with weights that are large enough for its layers to matter."""
    torch.manual_seed(0)
    model = kind(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.08)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


class Largest(TorchDispatchMode):
    """Within it `found` is the size in bytes of the largest tensor that an op has returned."""

    found = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.found = max(self.found, out.untyped_storage().nbytes())
        return out


def models() -> dict[str, Any]:
    """By its name, what makes a tiny model."""
    made: dict[str, Any] = {kind: lambda kind=kind: build(kind) for kind in FAMILIES}
    if M3 in KINDS:
        for index, options in enumerate(MINIMAX):
            made[f"minimax_m3-{index}"] = lambda options=options: tiny_minimax(**options)
    if QWEN in KINDS:
        for index, options in enumerate(QWENS):
            made[f"qwen4_exp-{index}"] = lambda options=options: tiny_qwen(**options)
    if V4 in KINDS:
        for index, options in enumerate(V4S):
            made[f"deepseek_v4-{index}"] = lambda options=options: tiny_v4(**options)
    if HAS_MISTRAL:
        for index, options in enumerate(MISTRAL):
            made[f"mistral_large4-{index}"] = lambda options=options: tiny_mistral(**options)
    if HAS_GLM5:
        for index, options in enumerate(GLM5):
            made[f"glm5_next-{index}"] = lambda options=options: tiny_glm5(**options)
    return made
