"""One rank of tests/contract/test_pieces.py: `FOLDER` holds models, a folder each, and
`asked.json`, a list of calls; what the rank finds goes to `found-RANK.json`."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from compile_once import share_references
from tensor_parallel_rank import load
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import StaticSlidingWindowLayer

import attnplug
from attnplug.policies import momo

NEW, GAMMAS = 5, (momo.FAR, momo.NEAR_GAMMA, momo.FAR_GAMMA)
OPTIONS = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)


def prompt_of(asked: dict[str, Any]) -> torch.Tensor:
    shape = asked.get("rows", 1), asked["tokens"]
    return torch.randint(2, 97, shape, generator=torch.Generator().manual_seed(3))


def content_of(cache: Any, heads: slice = slice(None)) -> list[torch.Tensor]:
    """Keys and values of each layer, as far as they are written: a window is full here."""
    found = []
    for layer in cache.layers:
        windowed = isinstance(layer, StaticSlidingWindowLayer)
        length = None if windowed else int(layer.cumulative_length)
        found += [x[:, heads, :length] for x in (layer.keys, layer.values)]
    return found


def largest_difference(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    assert [x.shape for x in some] == [x.shape for x in others]
    return max(float((x - y).abs().max()) for x, y in zip(some, others, strict=True))


@torch.no_grad()
def compare(model: PreTrainedModel, path: Path, asked: dict[str, Any], mesh: Any) -> dict[str, Any]:
    """A prefill in pieces beside one by this process alone."""
    ids, policy = prompt_of(asked), asked["policy"]
    momo.FAR, momo.NEAR_GAMMA, momo.FAR_GAMMA = asked.get("gammas", GAMMAS)
    found: dict[str, Any] = {}
    attnplug.apply(model, policy)
    alone = attnplug.make_cache(model, ids.shape[1] + 16)
    logits = model(ids, past_key_values=alone, logits_to_keep=1).logits
    wanted = model.generate(ids, **OPTIONS)[:, ids.shape[1] :]
    decoder, heads = None, slice(None)
    if asked.get("decoder"):
        decoder = attnplug.apply(load(path, **asked.get("options", {})), policy)
        split = attnplug.report(decoder).parallel
        if "does not split" not in split:
            each = alone.layers[0].keys.shape[1] // mesh.size()
            heads = slice(mesh.get_local_rank() * each, (mesh.get_local_rank() + 1) * each)
    cache, last = attnplug.prefill(
        model, ids, torch.ones_like(ids), mesh=mesh, decoder=decoder, **asked.get("given", {})
    )
    found["logits"] = float((last - logits).abs().max()) / float(logits.abs().max())
    found["cache"] = largest_difference(content_of(alone, heads), content_of(cache))
    found["heads"] = cache.layers[0].keys.shape[1]
    found["room"] = cache.layers[-1].max_cache_len
    first = last.argmax(-1)
    reader = model if decoder is None else decoder
    rest = reader.generate(torch.cat([ids, first], 1), past_key_values=cache, **OPTIONS)
    found["tokens"] = rest[:, ids.shape[1] :][:, :NEW].tolist() == wanted.tolist()
    found["chosen"] = wanted.tolist()
    # The model is as before: it computes by itself, in its own precision and masks.
    fresh = attnplug.make_cache(model, ids.shape[1] + 16)
    again = model(ids, past_key_values=fresh, logits_to_keep=1).logits
    found["restored"] = torch.equal(again, logits)
    attnplug.remove(model)
    return found


def main(folder: Path) -> None:
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("error", "`torch.distributed", FutureWarning)  # of attnplug's own calls
    torch.set_num_threads(1)
    share_references()
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), []
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for asked in json.loads((folder / "asked.json").read_text()):
        path = folder / asked["model"]
        options = {"dtype": torch.float32} | asked.get("options", {})
        model = AutoModelForCausalLM.from_pretrained(path, **options).eval()
        found.append(compare(model, path, asked, mesh))
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
