"""Tiny random models of every family that the contract names, each with the features that make it
different: sliding windows, softcaps, sinks, query norms, scaled attention."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 199
SHAPE: dict[str, Any] = dict(
    hidden_size=256,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=VOCABULARY,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)


@dataclass(frozen=True)
class Family:
    """A model family: how to build a tiny one, and which of its layers a policy must serve."""

    name: str
    model_class: Callable[..., PreTrainedModel]
    config_class: Callable[..., Any]
    served: tuple[int, ...] = (0, 1)
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, device: str = "cpu") -> PreTrainedModel:
        torch.manual_seed(1)
        model = self.model_class(self.config_class(**(SHAPE | self.options))).eval()
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.08)
        model.generation_config.eos_token_id = None
        return model.to(device)


HYBRID = ["sliding_attention", "full_attention"]
FAMILIES = [
    Family("llama", LlamaForCausalLM, LlamaConfig),
    Family("qwen2", Qwen2ForCausalLM, Qwen2Config),
    Family("qwen3", Qwen3ForCausalLM, Qwen3Config),
    Family("mistral", MistralForCausalLM, MistralConfig, options={"sliding_window": None}),
    Family("mistral-sliding", MistralForCausalLM, MistralConfig, (), {"sliding_window": 8}),
    Family(
        "gemma2",
        Gemma2ForCausalLM,
        Gemma2Config,
        (1,),
        {
            "sliding_window": 8,
            "query_pre_attn_scalar": 64,
            "attn_logit_softcapping": 2.0,
            # transformers 5.17 defaults to sdpa here, which drops the softcap
            "attn_implementation": "eager",
        },
    ),
    Family(
        "gemma3",
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        (1,),
        {"sliding_window": 8, "layer_types": HYBRID},
    ),
    Family("phi3", Phi3ForCausalLM, Phi3Config, options={"sliding_window": None}),
    Family("olmo2", Olmo2ForCausalLM, Olmo2Config),
    Family("granite", GraniteForCausalLM, GraniteConfig, options={"attention_multiplier": 0.1}),
    Family(
        "gpt-oss",
        GptOssForCausalLM,
        GptOssConfig,
        (1,),
        {
            "sliding_window": 8,
            "layer_types": HYBRID,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
]
