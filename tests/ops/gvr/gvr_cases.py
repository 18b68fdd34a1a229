"""What the tests of gvr's ops share; `topk_cases` has the rows of `topk`."""

import torch


def random(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dtypes(device_path):
    """Those that the path can multiply: Triton's interpreter cannot multiply bfloat16."""
    exact = [torch.float32, torch.float16]
    return exact if device_path == ("cpu", "kernel") else [*exact, torch.bfloat16]
