"""torch.jit.trace and torch.export: with a dynamic length, saved, loaded in a fresh process, with
the tokens of the model that was exported."""

import functools
import json
import shutil
import subprocess
import sys
import warnings

import pytest
import torch

import attnplug
from attnplug.testing.policy import tiny_model

PROMPT = torch.randint(2, 90, (1, 21), generator=torch.Generator().manual_seed(0))
NEW = 12
MOMO = "momo(gamma=8, block=16, query_block=16, top_k=8, tail=8, min_tokens=0)"
# A process that knows attnplug's ops and nothing of the model; it forks for each program, so that
# each has what a process has after its imports. A request is program, kind, prompt, new tokens.
SERVE = """
import json, os, sys, traceback
import torch, torch._inductor, torch.export, attnplug.ops

def continued(path, kind, prompt, new):
    if kind == "package":
        program, kind = torch._inductor.aoti_load_package(path), "step"
    else:
        program = torch.jit.load(path) if kind == "trace" else torch.export.load(path).module()
    tokens = list(prompt)
    with torch.no_grad():
        if kind == "step":
            for token in prompt[:-1]:
                program(torch.tensor([[token]]))
        for _ in range(new):
            if kind == "step":
                logits = program(torch.tensor([tokens[-1:]]))
            else:
                ids = torch.tensor([tokens])
                logits = program(ids, torch.ones_like(ids))
            tokens.append(int(logits[0, -1].argmax()))
    return tokens

for line in sys.stdin:
    child = os.fork()
    if not child:
        code = 1
        try:
            answer = json.dumps(continued(*json.loads(line)))
            print("tokens", answer, flush=True)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    print("done", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Forward(torch.nn.Module):
    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits


class Step(torch.nn.Module):
    """One decode step; the cache's tensors are the program's buffers."""

    def __init__(self, model: torch.nn.Module, size: int):
        super().__init__()
        self.model, self.cache = model, attnplug.make_cache(model, size)
        with torch.no_grad():
            model(PROMPT, past_key_values=self.cache)  # allocates
        self.cache.reset()
        for index, layer in enumerate(self.cache.layers):
            for name, value in vars(layer).items():
                parts = value if isinstance(value, tuple) else [value]
                for place, part in enumerate(parts):
                    if isinstance(part, torch.Tensor):
                        self.register_buffer(f"{name}_{index}_{place}", part)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, past_key_values=self.cache).logits


@functools.cache
def wanted() -> list[int]:
    mask = torch.ones_like(PROMPT)
    return (
        tiny_model()
        .generate(PROMPT, attention_mask=mask, max_new_tokens=NEW, do_sample=False)[0]
        .tolist()
    )


@pytest.fixture(scope="module")
def tokens_of(tmp_path_factory):
    """What a program in a file gives in a fresh process, by its path and kind."""
    errors = tmp_path_factory.mktemp("process") / "stderr"
    command = [sys.executable, "-c", SERVE]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with errors.open("w") as stderr, subprocess.Popen(command, stderr=stderr, **pipes) as process:

        def ask(path, kind: str) -> list[int]:
            request = [str(path), kind, PROMPT[0].tolist(), NEW]
            print(json.dumps(request), file=process.stdin, flush=True)
            answers = []
            for line in process.stdout:
                word, _, rest = line.partition(" ")
                if word == "done":
                    assert int(rest) == 0, errors.read_text()
                    return answers[-1]
                if word == "tokens":
                    answers.append(json.loads(rest))
            raise AssertionError(errors.read_text())

        yield ask
        process.stdin.close()


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates jit, and tells what a trace fixes
        yield


def exported(policy: str, path, strict: bool):
    """Export a forward pass with a dynamic length to a file."""
    model = attnplug.apply(tiny_model(), policy)
    least = 17 if "query_block=16" in policy else 2
    length = torch.export.Dim("length", min=least, max=512)
    inputs = PROMPT, torch.ones_like(PROMPT)
    with torch.no_grad():
        program = torch.export.export(
            Forward(model), inputs, dynamic_shapes=({1: length}, {1: length}), strict=strict
        )
    torch.export.save(program, path)


def test_a_program_of_any_length_gives_the_same_tokens(exact, tokens_of, tmp_path):
    exported(exact, tmp_path / "model.pt2", strict=True)
    assert tokens_of(tmp_path / "model.pt2", "forward") == wanted()


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 guards strides of the stock model, too"
)
@pytest.mark.parametrize("policy", ["dense", MOMO])
def test_so_does_one_that_is_not_traced_by_dynamo(policy, tokens_of, tmp_path):
    """Of a prefill by transformers' attention function, and of one by an op."""
    exported(policy, tmp_path / "model.pt2", strict=False)
    assert tokens_of(tmp_path / "model.pt2", "forward") == wanted()


def test_a_program_of_one_step_gives_the_same_tokens(exact, tokens_of, tmp_path):
    model = attnplug.apply(tiny_model(), exact)
    with torch.no_grad():
        program = torch.export.export(Step(model, 40), (PROMPT[:, :1],), strict=True)
    torch.export.save(program, tmp_path / "step.pt2")
    assert tokens_of(tmp_path / "step.pt2", "step") == wanted()


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor has no C++ compiler: install g++")
def test_a_packaged_step_gives_the_same_tokens(tokens_of, tmp_path):
    """AOTInductor, with an op that appends. Inductor takes what the cache holds when it is exported
    for constants, and folds what it computes of them: docs/start/quickstart.md has the option."""
    model = attnplug.apply(tiny_model(), "gather(k=8, block=16, local=2, min_tokens=0)")
    with torch.no_grad():
        program = torch.export.export(Step(model, 40), (PROMPT[:, :1],), strict=True)
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(tmp_path / "step.pt2"),
            inductor_configs={"joint_graph_constant_folding": False},
        )
    assert tokens_of(tmp_path / "step.pt2", "package") == wanted()


def test_a_trace_gives_the_same_tokens(exact, tokens_of, tmp_path):
    model = attnplug.apply(tiny_model(), exact)
    with torch.no_grad():
        traced = torch.jit.trace(
            Forward(model), (PROMPT, torch.ones_like(PROMPT)), check_trace=False
        )
    torch.jit.save(traced, str(tmp_path / "model.pt"))
    assert tokens_of(tmp_path / "model.pt", "trace") == wanted()


@torch.no_grad()
def test_a_trace_keeps_the_mask():
    """One that was made without padding, given padding."""
    model = attnplug.apply(tiny_model(), "dense")
    traced = torch.jit.trace(Forward(model), (PROMPT, torch.ones_like(PROMPT)), check_trace=False)
    mask = torch.ones_like(PROMPT)
    mask[0, :6] = 0
    stock = tiny_model()(input_ids=PROMPT, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(traced(PROMPT, mask)[:, 6:], stock[:, 6:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("policy", "least"),
    [("momo(min_tokens=0)", 129), ("prefill=stream(query_block=32)", 33)],
)
def test_an_open_length_of_one_block_says_what_to_declare(policy, least):
    model = attnplug.apply(tiny_model(), policy)
    length = torch.export.Dim("length", min=2, max=512)
    inputs = PROMPT, torch.ones_like(PROMPT)
    with (
        torch.no_grad(),
        pytest.raises(
            attnplug.UnsupportedCallError, match=rf"torch\.export\.Dim\(name, min={least}\)"
        ),
    ):
        torch.export.export(
            Forward(model), inputs, dynamic_shapes=({1: length}, {1: length}), strict=False
        )
