"""What the tests of continuous batching share: small models, prompts, settings, and tokens of a
batch and of generate."""

import torch
from transformers import (
    ContinuousBatchingConfig,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from attnplug.models import paged

PAGE, NEW = 32, 6
GATHER = "gather(k=2, block=16, sink=1, local=2, min_tokens=0)"
GVR = "gvr(k=6, sink=1, window=4, min_tokens=0)"
MOMO = "momo(top_k=2, block=16, query_block=16, gamma=16, tail=8, min_tokens=0)"
LENGTHS = (1, 5, 40, 200, 333)
SIZE = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"
SETTINGS = {
    "block table": dict(num_blocks=96, max_batch_tokens=1024),
    "indices": dict(num_blocks=96, max_batch_tokens=1024, max_blocks_per_request=0),
    "evicted": dict(num_blocks=26, max_batch_tokens=512, safety_margin=0.0),
    "chunks": dict(num_blocks=96, max_batch_tokens=64, allow_block_sharing=False),
}
SIZES = dict(
    vocab_size=97,
    hidden_size=256,
    intermediate_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    bos_token_id=1,
    eos_token_id=2,
)
ENDLESS = GenerationConfig(
    max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0, disable_compile=True
)


def llama():
    """Attention of it is peaked enough that gather's few blocks change tokens."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **SIZES)).eval()
    for weight in model.parameters():
        weight.data *= 3
    return model


def gemma():
    """A sliding layer before each full one."""
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        num_hidden_layers=2, head_dim=64, sliding_window=48, layer_types=kinds, **SIZES
    )
    model = Gemma3ForCausalLM(config).eval()
    for weight in model.parameters():
        weight.data *= 2
    return model


def prompts(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in lengths]


def one_by_one(model, ids):
    found = []
    for x in ids:
        row = torch.tensor([x], device=model.device)
        out = model.generate(row, generation_config=ENDLESS, attention_mask=torch.ones_like(row))
        found.append(out[0, len(x) :].tolist())
    return found


def settings(**options):
    return ContinuousBatchingConfig(**{SIZE: PAGE}, **options)


def batched(model, ids, generation=ENDLESS, warmup=False, **options):
    got = model.generate_batch(
        ids,
        generation_config=generation,
        continuous_batching_config=settings(**options),
        warmup=warmup,
    )
    assert {x.error for x in got.values()} == {None}
    return [x.generated_tokens for x in got.values()]


def first_layer(model):
    return next(x for x in model.modules() if paged.binding_of(x) is not None)
