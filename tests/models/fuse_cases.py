"""Models of the tests of fused projections, and what these look at."""

import torch
import transformers

SHAPE = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=64,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0,
    bos_token_id=1, eos_token_id=None, initializer_range=0.3,
)  # fmt: skip
FAMILIES = {
    "Llama": {},
    "Qwen2": {"hidden_size": 256},
    "Qwen3": {},
    "Mistral": {"sliding_window": None},
    "Gemma": {"hidden_act": "gelu_pytorch_tanh"},
}
WHOLE = (
    "decode has one product for q_proj, k_proj, v_proj in 2 layers and one product for "
    "gate_proj, up_proj in 2 layers"
)


def family(name: str, device: str = "cpu"):
    config = getattr(transformers, f"{name}Config")(**(SHAPE | FAMILIES[name]))
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # biases too
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model.to(device)


def tokens_of(model, *, tokens: int = 30, new: int = 20, **options):
    random = torch.Generator().manual_seed(tokens)
    ids = torch.randint(3, 97, (2, tokens), generator=random).to(model.device)
    found = model.generate(ids, max_new_tokens=new, do_sample=False, **options)
    return found[:, tokens:].tolist()


def layer_of(model):
    return model.model.layers[0].self_attn


def memory_of(model) -> int:
    """Bytes of all memory that the parameters keep."""
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in model.parameters()
    }
    return sum(storages.values())
