"""Tiny random models of every causal family that transformers has, four layers each, with windows
and chunks shorter than the prompts, and the calls that are compared."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from attnplug.models.names import CACHE

KINDS = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
WINDOW, LAYERS, VOCABULARY, NEW = 16, 4, 97, 4
LARGEST = 1e8  # parameters
# What a config of any family may have; a name that it lacks is left out.
SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    vocab_size_per_layer_input=VOCABULARY,
    unpadded_vocab_size=VOCABULARY,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    is_decoder=True,
    hidden_size=128,
    n_embd=128,
    d_model=128,
    lru_width=128,
    intermediate_size=64,
    intermediate_size_mlp=64,
    ffn_dim=64,
    decoder_ffn_dim=64,
    hidden_size_per_layer_input=16,
    num_hidden_layers=LAYERS,
    n_layer=LAYERS,
    decoder_layers=LAYERS,
    num_kv_shared_layers=0,
    num_attention_heads=2,
    n_head=2,
    decoder_attention_heads=2,
    num_key_value_heads=1,
    num_global_key_value_heads=1,
    head_dim=64,
    global_head_dim=64,
    query_pre_attn_scalar=64,
    max_position_embeddings=512,
    n_positions=512,
    use_sliding_window=True,
    max_window_layers=2,
    sliding_window=WINDOW,
    attention_chunk_size=WINDOW,
    attention_window_size=WINDOW,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_rope_head_dim=32,
    qk_nope_head_dim=32,
    v_head_dim=64,
    index_n_heads=16,  # of fewer, relu leaves many tokens a score of exactly 0: ties
    index_head_dim=32,
    index_topk=8,
    index_block_size=4,
    index_topk_blocks=3,
    index_local_blocks=1,
    indexer_n_heads=16,
    indexer_kv_heads=1,
    indexer_head_dim=64,
    indexer_budget=8,
    indexer_compress_ratio=4,
    hc_count=2,
    hc_lowrank=16,
    num_experts=2,
    num_local_experts=2,
    num_experts_per_tok=1,
    n_routed_experts=4,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    moe_num_experts=2,
    moe_topk=1,
    moe_num_shared_experts=1,
    mamba_d_state=16,
    mamba_n_heads=4,
    mamba_d_head=64,
    mamba_n_groups=1,
    mamba_expand=2,
    mamba_num_heads=4,
    mamba_head_dim=64,
    n_groups=1,
    ssm_state_size=16,
    time_step_rank=8,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_num_heads=2,
    linear_head_dim=32,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
)
# What only one family calls so, or needs beside the sizes.
OWN: dict[str, dict[str, Any]] = {
    "bamba": dict(attn_layer_indices=[1, 3]),
    "blt": dict(encoder_hash_byte_group_vocab=128, encoder_hash_byte_group_size=[3, 4]),
    "blt_local_decoder": dict(hidden_size_global=128),
    "blt_local_encoder": dict(hidden_size_global=128),
    "cohere_compass_text": dict(
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "sliding_attention": dict(
                rope_type="default", rope_theta=1e4, mrope_section=[12, 10, 10]
            ),
            "full_attention": None,
        },
    ),
    "dbrx": dict(
        n_heads=2,
        n_layers=LAYERS,
        attn_config=dict(kv_n_heads=1, clip_qkv=8.0, rope_theta=1e4),
        ffn_config=dict(hidden_size=128, ffn_hidden_size=64, moe_num_experts=2),
    ),
    "diffllama": dict(num_attention_heads=4, num_key_value_heads=2),
    "dory": dict(n_input_layers=1, n_recurrent_layers=2, n_output_layers=1),
    "dots3_note_audio_encoder": dict(adapter_input_size=128, adapter_out_dim=128),
    "dots3_note_text": dict(
        swa_num_attention_heads=2,
        swa_num_key_value_heads=2,
        swa_q_lora_rank=32,
        swa_kv_lora_rank=48,
        swa_head_dim=64,
        swa_qk_nope_head_dim=32,
        swa_v_head_dim=64,
    ),
    "dots3_note_vision_encoder": dict(adapter_in_dim=128, adapter_out_dim=128),
    "falcon": dict(new_decoder_architecture=True, num_kv_heads=1),
    "falcon_h1": dict(mamba_d_ssm=256),
    "got_ocr2_vision": dict(image_size=64),
    "gpt_neo": dict(attention_types=[[["global", "local"], 2]], window_size=WINDOW),
    "granitemoehybrid": dict(layer_types=["linear_attention", "full_attention"] * 2),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=8),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * 2),
    "longcat_flash": dict(num_layers=2, zero_expert_num=2, num_experts_per_tok=2, moe_topk=2),
    "mamba2": dict(num_heads=4),
    "musicgen_decoder": dict(num_codebooks=1),
    "musicgen_melody_decoder": dict(num_codebooks=1),
    "phi4_multimodal_audio": dict(num_blocks=4, nemo_conv_channels=64, ext_pw_out_channel=128),
    "prophetnet": dict(num_decoder_layers=2, num_encoder_layers=2),
    "reformer": dict(axial_pos_embds=False),
    "xlnet": dict(d_inner=64),
    "xlstm": dict(num_heads=2, embedding_dim=128, num_blocks=4),
    "xmod": dict(default_language="en_XX"),
}


# All layers of these have a window, or none has.
WINDOW_OR_NOT = (
    "ministral3",
    "mistral",
    "mixtral",
    "phi3",
    "phi4_multimodal",
    "phimoe",
    "qwen3_moe",
    "starcoder2",
)


class NoTinyModel(Exception):
    """These sizes do not go together in a family, or lead to a large model."""


def build(kind: str, **options: Any) -> PreTrainedModel:
    """A tiny model of a family. Raises NoTinyModel."""
    try:
        config = _config(kind, options)
        family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        parts = (part for part in vars(config).values() if type(part) is family.config_class)
        config = next(parts, config)
        with torch.device("meta"):
            empty = family._from_config(config)
        size = sum(each.numel() for each in empty.parameters())
        if size > LARGEST:
            raise NoTinyModel(f"{size:,} parameters")
        torch.manual_seed(0)
        model = family._from_config(config).eval()
    except Exception as why:  # each family refuses sizes by an error of its own
        raise NoTinyModel(f"{kind}: {why}") from why
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.08)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
        model.generation_config.decoder_start_token_id = 0  # of Musicgen's codebooks
    return model


def _config(kind: str, options: dict[str, Any]) -> PreTrainedConfig:
    return _tiny(CONFIG_MAPPING[kind](), options)


def _tiny(base: PreTrainedConfig, options: dict[str, Any] | None = None) -> PreTrainedConfig:
    """A config of the same family, and of the same families in its parts, with few numbers."""
    family, own = type(base), OWN.get(base.model_type, {})
    set_alone = {name for name in dir(family) if isinstance(getattr(family, name), property)}
    known = {*vars(base), *dir(family), *family.attribute_map} - set_alone
    sizes = {name: value for name, value in SIZES.items() if name in known}
    if "kv_lora_rank" in sizes:  # latent attention: the rotary part has a head dimension of its own
        sizes |= {"head_dim": 32} if "head_dim" in sizes else {}
        sizes |= {"num_key_value_heads": 2} if "num_key_value_heads" in sizes else {}
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        given = vars(base).get(name)
        if isinstance(given, list) and given:
            types = list(dict.fromkeys(given))  # each type of layer, in turn
            sizes[name] = [types[index % len(types)] for index in range(LAYERS)]
    for name, part in vars(base).items():
        if isinstance(part, PreTrainedConfig) and part.model_type:
            sizes[name] = _tiny(part)
    return family(**(sizes | own | (options or {})))


# Each kind of call once, with each length, and with and without padding: what CI compares.
FEW = {
    "10 tokens, padded: generate",
    "40 tokens: forward",
    "40 tokens, padded: turns",
    "10 tokens: dynamic",
    "chunks",
}
Form = Callable[[PreTrainedModel], torch.Tensor]


def forms(asked: tuple[str, ...] = ("dynamic",)) -> dict[str, Form]:
    """What is compared: prompts below and above the window, padded or not, with the caches that
    generate makes, that a user has `asked` for, and that a call returned."""
    found: dict[str, Form] = {}
    for tokens, padded in ((10, False), (10, True), (40, False), (40, True)):
        name = f"{tokens} tokens{', padded' if padded else ''}"
        ids = torch.randint(3, VOCABULARY, (2, tokens), generator=torch.Generator().manual_seed(1))
        mask = torch.ones_like(ids)
        if padded:
            mask[0, :5] = ids[0, :5] = 0
        found[f"{name}: forward"] = lambda model, ids=ids, mask=mask: _forward(model, ids, mask)
        found[f"{name}: generate"] = lambda model, ids=ids, mask=mask: _scores(model, ids, mask)
        found[f"{name}: turns"] = lambda model, ids=ids, mask=mask: _turns(model, ids, mask)
        for cache in asked:
            found[f"{name}: {cache}"] = lambda model, ids=ids, mask=mask, cache=cache: _scores(
                model, ids, mask, cache_implementation=cache
            )
    found["chunks"] = lambda model: _scores(model, ids, torch.ones_like(ids), prefill_chunk_size=7)
    return found


def _forward(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]


def _generate(model: Any, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> Any:
    options = dict(max_new_tokens=NEW, do_sample=False, output_logits=True) | options
    return model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **options)


def _scores(model: Any, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.stack(_generate(model, ids, mask, **options).logits, 1)


def _turns(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The second of two calls, on the cache that the first returned."""
    first = _generate(model, ids, mask)
    ids = torch.cat([first.sequences, ids[:, -3:]], 1)
    mask = torch.cat([mask, mask.new_ones(2, ids.shape[1] - mask.shape[1])], 1)
    return _scores(model, ids, mask, **{CACHE: first[CACHE]})
