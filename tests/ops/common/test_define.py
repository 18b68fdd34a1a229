"""What is registered as an op is nothing that torch.compile looks into."""

import contextlib

import pytest
import torch

from attnplug.ops.common.define import define_composite, define_op


def _fill(x, out):
    out.copy_(x * 2)


def _op(name):
    return define_op(
        f"{name}(Tensor x) -> Tensor", allocate=torch.empty_like, cpu=_fill, cuda=_fill
    )


def _composite(name):
    return define_composite(
        f"{name}(Tensor x) -> Tensor", allocate=torch.empty_like, run=lambda x: x + x
    )


@pytest.mark.parametrize("make", [_op, _composite])
def test_code_that_is_compiled_in_parts_leaves_an_op_alone(make):
    """A part that dynamo cannot trace runs as it is written, and dynamo looks at every call that it
    makes."""
    op, graphs = make(f"left_alone_{make.__name__}"), []

    class Untraceable(contextlib.AbstractContextManager):
        def __exit__(self, *_):
            return None

    def part(x):
        with Untraceable():
            torch._dynamo.graph_break()
            return op(x)

    def backend(graph, _):
        graphs.append(graph)
        return graph

    x = torch.ones(3)
    assert torch.equal(torch.compile(part, backend=backend)(x), x * 2)
    assert not graphs
