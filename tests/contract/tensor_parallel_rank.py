"""One rank of tests/contract/test_tensor_parallel.py: `FOLDER` holds models, a folder each, and
`asked.json`; what the rank finds goes to `found-RANK.json`."""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from compile_once import share_references
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import attnplug
from attnplug import trace
from attnplug.models.parallel import local_weights

TOKENS, NEW, PADDED = 70, 5, 13


def tokens_of(model, policy: str) -> list[list[int]]:
    """What a model generates under a policy ("" for none), one row of two padded on the left."""
    with attnplug.applied(model, policy) if policy else nullcontext():
        return tokens_of_applied(model)


def sampled_of(model) -> dict:
    """What a model samples in attnplug's loop, rows that end before others among it, and the next
    random number."""
    torch.manual_seed(7)
    with attnplug.applied(model, "dense"):
        ends = [5, 8, 11, 14, 17, 20, 23]
        tokens = tokens_of_applied(model, do_sample=True, eos_token_id=ends, max_new_tokens=24)
        assert attnplug.report(model).loop == "", attnplug.report(model).loop
    return {"tokens": tokens, "next": float(torch.rand(1))}


def tokens_of_applied(model, **asked) -> list[list[int]]:
    ids = torch.randint(2, 97, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    ids = ids.to(model.device)
    mask = torch.ones_like(ids)
    mask[1, :PADDED] = 0
    options = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0) | asked
    return model.generate(ids, attention_mask=mask, **options)[:, TOKENS:].tolist()


@torch.no_grad()
def fused_of(model) -> dict:
    """Tokens of a model whose steps fuse the projections that its plan lets them, what the report
    says of it, and whether the weights are bit for bit what they were, in as much memory."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):  # as on a GPU: here a part is of the file's memory
            parameter._local_tensor = parameter.to_local().clone()
    before = {name: each.clone() for name, each in parts_of(model)}
    memory = memory_of(model)
    with attnplug.applied(model, "dense", fuse=True):
        tokens = tokens_of_applied(model)
        said = attnplug.report(model).fused
        held = len({each.untyped_storage().data_ptr() for _, each in parts_of(model)})
        kept = memory_of(model) == memory
        again = tokens_of_applied(model)
    restored = all(torch.equal(each, before[name]) for name, each in parts_of(model))
    return {
        "tokens": tokens,
        "again": again == tokens,
        "says": said,
        "joined": len(before) - held,
        "restored": restored and kept and memory_of(model) == memory,
    }


def parts_of(model) -> list[tuple[str, torch.Tensor]]:
    """This rank's parts of the weights that are split."""
    return [(n, p.to_local()) for n, p in model.named_parameters() if isinstance(p, DTensor)]


def memory_of(model) -> int:
    """Bytes of all memory that the parts keep."""
    storages = (part.untyped_storage() for _, part in parts_of(model))
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


@torch.no_grad()
def picks_of(model) -> dict:
    """Tokens of steps that sketch picks in a text long enough for it, and its kept queries: they
    are those of this process's heads, and a ring of another size would stay empty."""
    ids = torch.randint(2, 97, (1, 800), generator=torch.Generator().manual_seed(5))
    with attnplug.applied(model, "sketch(k=8, min_tokens=0)"):
        cache = attnplug.make_cache(model, ids.shape[1] + NEW)
        tokens = [model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)]
        for _ in range(NEW - 1):
            tokens.append(model(tokens[-1], past_key_values=cache).logits[:, -1:].argmax(-1))
    layer = cache.layers[0]
    heads = layer.recent.any(-1).any(-1).sum()
    return {"tokens": torch.cat(tokens).flatten().tolist(), "heads": int(heads)}


def load(path: Path, **options):
    split = DistributedConfig(tp_size=int(os.environ["WORLD_SIZE"]))
    return AutoModelForCausalLM.from_pretrained(
        path, distributed_config=split, dtype=torch.float32, **options
    ).eval()


def report_of(model) -> dict:
    """The report's line, the heads of the first layer's cache, and what apply raised instead."""
    try:
        with attnplug.applied(model, "dense"):
            cache = attnplug.make_cache(model, 16)
            with torch.no_grad():
                model(torch.ones(1, 4, dtype=torch.long), past_key_values=cache)
            text = attnplug.report(model).parallel
            return {"says": text, "heads": [layer.keys.shape[1] for layer in cache.layers]}
    except attnplug.UnsupportedModelError as error:
        return {"says": str(error)}


def trace_of(model, path: Path) -> list[int]:
    """Query heads and KV heads that this rank's trace tells of."""
    with attnplug.applied(model, "dense+stream(top_k=2, block=16, query_block=16)"):
        cache = attnplug.make_cache(model, 80)
        with torch.no_grad(), trace.record(model, path):
            model(torch.arange(2, 72)[None], past_key_values=cache)
    meta = trace.read(path).meta
    return [meta["heads"], meta["kv_heads"]]


@torch.no_grad()
def steps_of(model, policy: str, compiled: bool) -> list[int]:
    """The tokens of a prompt's first steps in a loop of one's own, and that compiled code takes
    plain weights where `local_weights` gives them."""
    ids = torch.randint(2, 97, (1, TOKENS), generator=torch.Generator().manual_seed(5))
    weights: list[int] = []

    def backend(graph, inputs):
        weights.append(sum(isinstance(x, DTensor) and x.dim() > 1 for x in inputs))
        return aot_eager(graph, inputs)

    torch.compiler.reset()
    step = torch.compile(model, fullgraph=True, backend=backend) if compiled else model
    with attnplug.applied(model, policy):
        cache = attnplug.make_cache(model, TOKENS + NEW)
        tokens = [model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)]
        for _ in range(NEW - 1):
            tokens.append(step(tokens[-1], past_key_values=cache).logits[:, -1:].argmax(-1))
    if compiled:
        assert len(weights) <= 2, f"compiled {len(weights)} times"
        linear = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
        plain = not any(isinstance(weight, DTensor) for weight in linear)
        # The embedding table's DTensor stays: transformers needs it to be one.
        assert (weights[-1] <= 1) == plain
    return torch.cat(tokens).flatten().tolist()


def compiled_steps_of(model, policy: str) -> bool:
    """Whether compiled steps give the tokens of those that are not, with weights of both kinds; and
    whether the split weights are back."""
    wanted = steps_of(model, policy, compiled=False)
    before = dict(model.named_parameters())
    found = [steps_of(model, policy, compiled=True)]
    with local_weights(model):
        found.append(steps_of(model, policy, compiled=True))
    after = dict(model.named_parameters())
    restored = all(after[name] is parameter for name, parameter in before.items())
    return found == [wanted, wanted] and restored


def main(folder: Path) -> None:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    share_references()
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    for name, asked in json.loads((folder / "asked.json").read_text()).items():
        model = load(folder / name, **asked.get("options", {}))
        told: dict = {"report": report_of(model)}
        told["tokens"] = {policy: tokens_of(model, policy) for policy in asked["policies"]}
        if asked.get("fused"):
            told["fused"] = fused_of(model)
        if asked.get("full"):
            told["sketch"], told["sampled"] = picks_of(model), sampled_of(model)
            told["trace"] = trace_of(model, folder / f"{name}-{rank}.parquet")
        told["compiled"] = [compiled_steps_of(model, x) for x in asked.get("compiled", [])]
        found[name] = told
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
