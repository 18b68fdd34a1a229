"""Tiny models whose cache keeps latents that a query reads all of (multi-head latent attention)."""

from typing import Any

import transformers
from every_family import KINDS, build
from indexed_cases import drawn
from transformers import PreTrainedModel

# All their layers, but for linear ones among those of the last two.
FAMILIES = [
    kind
    for kind in (
        "deepseek_v3",
        "deepseek_v2",
        "glm4_moe_lite",
        "axk1",
        "sarvam_mla",
        "minicpm3",
        "youtu",
        "kimi_linear",
        "bailing_hybrid",
    )
    if kind in KINDS
]
LONGCAT = "longcat_flash"
VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def tiny_kimi() -> PreTrainedModel:
    """Kimi-K2.5, whose text model is DeepSeek-V3's."""
    from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

    text = build("deepseek_v3").config.to_dict()
    config = Kimi_K25Config(
        text_config=text,
        vision_config=VISION,
        projection_hidden_size=64,
        tie_word_embeddings=False,
        image_token_id=2,
        video_token_id=2,
    )
    return drawn(Kimi_K25ForConditionalGeneration, config)


def tiny_mistral4() -> PreTrainedModel:
    """Mistral 4, which scales queries by their positions."""
    from transformers import Mistral4Config, Mistral4ForCausalLM

    known = build("deepseek_v3").config.to_dict()
    other = {"rope_parameters", "model_type", "architectures", "dtype", "head_dim"}
    kept = {*vars(Mistral4Config())} - other
    config = Mistral4Config(**{name: value for name, value in known.items() if name in kept})
    return drawn(Mistral4ForCausalLM, config)


def models() -> dict[str, Any]:
    """By its name, what makes a tiny model."""
    made: dict[str, Any] = {kind: lambda kind=kind: build(kind) for kind in FAMILIES}
    if LONGCAT in KINDS:  # whose own code wants two experts a token
        made[LONGCAT] = lambda: build(LONGCAT, moe_topk=2, num_experts_per_tok=2)
    if hasattr(transformers, "Kimi_K25ForConditionalGeneration"):
        made["kimi_k25"] = tiny_kimi
    if hasattr(transformers, "Mistral4ForCausalLM"):
        made["mistral4"] = tiny_mistral4
    return made
