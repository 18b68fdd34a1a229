"""On a GPU: compiled decode runs as CUDA graphs, gives eager's tokens and does not recompile."""

import pytest
import torch
from contract_cases import GRAPHS
from families import FAMILIES, VOCABULARY
from torch._dynamo.utils import counters
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import attnplug
from attnplug import UnsupportedCallError
from attnplug.models.captured import CapturedStep, capture
from attnplug.models.generate import LOOP

pytestmark = [
    pytest.mark.gpu,
    # Inductor imports what it deprecates, and says so where the machine is small.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("policy", GRAPHS.values(), ids=GRAPHS)
@pytest.mark.parametrize("family", [FAMILIES[0], FAMILIES[6]], ids=lambda family: family.name)
def test_generate_compiles_to_cuda_graphs(family, policy):
    """The model's own steps are captured, and then compiled; all are one graph, also where rolling
    windows take transformers two."""
    model = family.build("cuda")
    ids = torch.randint(3, VOCABULARY, (2, 50), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    options = dict(attention_mask=mask, max_new_tokens=24, do_sample=False)
    with attnplug.applied(model, policy):
        wanted = model.generate(ids, disable_compile=True, **options)
        found = model.generate(ids, **options)
        loop = vars(model)[LOOP]
        assert type(loop.step.now) is CapturedStep and loop.step.now.replay is not None
        assert torch.equal(found, wanted) and counters["stats"]["unique_graphs"] == 0
        loop.compile_soon()
        found = model.generate(ids, **options)
        step = loop.step.now
    assert torch.equal(found, wanted)
    assert counters["stats"]["unique_graphs"] == 1
    assert isinstance(step.now, CapturedStep) and step.now.replay is not None


def test_captures_take_no_more_memory_and_launch_no_kernel_beside_the_current_stream():
    """A step is captured anew for every cache that has come to other memory."""
    x = torch.ones(64, 64, device="cuda")
    step = CapturedStep(lambda y: x @ y)  # cuBLAS takes a workspace for each stream
    taken = []
    for scale in range(8):
        y = torch.full_like(x, scale)
        step.begin()
        for _ in range(3):
            found = step(y)
        assert torch.equal(found, x @ y)
        del found
        taken.append(torch.cuda.memory_allocated())
    assert max(taken[2:]) - taken[1] < 1 << 20
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        x.add_(1)
        capture(lambda: x @ x, torch.cuda.Stream)
    torch.cuda.synchronize()
    kernels = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    streams = {event.device_resource_id for event in kernels}
    assert len(streams) == 1, [(event.name, event.device_resource_id) for event in kernels]


@torch.no_grad()
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("policy", GRAPHS.values(), ids=GRAPHS)
def test_decode_replays_one_graph_as_the_sequence_grows(policy):
    model = FAMILIES[0].build("cuda").to(torch.bfloat16)
    ids = torch.randint(3, VOCABULARY, (1, 40), device="cuda")
    with attnplug.applied(model, policy):
        cache = attnplug.make_cache(model, 128)
        model(ids, past_key_values=cache)
        step = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        token = ids[:, :1]
        for _ in range(3):
            step(token, past_key_values=cache)
        with torch._dynamo.config.patch(error_on_recompile=True):
            compiled = torch.cat(
                [step(token, past_key_values=cache).logits.clone() for _ in range(40)], 1
            )
        again = attnplug.make_cache(model, 128)
        model(torch.cat([ids, token.expand(1, 3)], 1), past_key_values=again)
        eager = torch.cat([model(token, past_key_values=again).logits for _ in range(40)], 1)
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert (compiled - eager).abs().max() < 0.02 * eager.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("policy", GRAPHS.values(), ids=GRAPHS)
def test_a_prefill_can_be_captured_by_hand(policy):
    """Nothing in a prefill of known tokens syncs with the host under capture."""
    model = FAMILIES[0].build("cuda").to(torch.bfloat16)
    ids = torch.randint(3, VOCABULARY, (1, 70), device="cuda")
    with attnplug.applied(model, policy):
        wanted = model(ids, use_cache=True).logits
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = model(ids, use_cache=True).logits
        graph.replay()
    assert (found - wanted).abs().max() <= 0.02 * wanted.abs().max()


@torch.no_grad()
def test_a_capture_without_cache_and_mask_is_refused():
    """As in compiled code: see test_traps."""
    model = FAMILIES[0].build("cuda").to(torch.bfloat16)
    ids = torch.randint(3, VOCABULARY, (1, 70), device="cuda")
    with attnplug.applied(model, "dense"):
        model(ids, use_cache=True)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            with pytest.raises(UnsupportedCallError, match="packed sequences"):
                model(ids, use_cache=False)
