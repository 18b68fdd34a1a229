"""The demo end to end on a short prompt: both answers, what the mask read, the table, the PNG."""

import dataclasses
import io

import pytest
from matplotlib import image
from rich.console import Console
from typer.testing import CliRunner

from attnplug import demo
from attnplug.cli import app
from attnplug.errors import ArgumentError


@pytest.fixture(scope="module")
def said():
    return io.StringIO()


@pytest.fixture(scope="module")
def result(tmp_path_factory, said):
    path = tmp_path_factory.mktemp("demo") / "pictures" / "mask.png"
    piped = Console(file=said, width=40)
    return demo.run(1024, top_k=4, device="cpu", image=path, console=piped)


def test_a_pipe_gets_a_line_a_step(result, said):
    lines = said.getvalue().splitlines()
    tokens = f"{result.needle.ids.shape[1]:,} tokens"
    assert lines == [
        "compiling kernels on a short prompt",
        f"stock: {tokens}",
        f"{result.policy}: {tokens}",
        "exact attention mass inside the mask",
        "drawing the mask",
    ]


def test_on_a_cpu_the_command_speaks_of_speed_before_its_table(result, monkeypatch):
    monkeypatch.setattr(demo, "run", lambda *arguments, **options: result)
    printed = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["demo", "--device", "cpu"]).stdout
    assert printed.startswith(demo.ON_A_CPU)
    assert "needs a GPU" in printed.partition("which number hides")[0]
    on_gpu = dataclasses.replace(result, device="cuda")
    monkeypatch.setattr(demo, "run", lambda *arguments, **options: on_gpu)
    assert demo.ON_A_CPU not in CliRunner(env={"COLUMNS": "200"}).invoke(app, ["demo"]).stdout


def test_both_find_the_answer(result):
    assert 920 <= result.needle.ids.shape[1] <= 1024
    assert result.stock.found and result.momo.found
    assert result.needle.answer in result.stock.reply
    assert result.needle.answer in result.momo.reply


def test_times_are_times(result):
    for run in (result.stock, result.momo):
        assert 0 < run.decode_s < run.prefill_s


def test_the_mask_reads_a_part_and_keeps_nearly_what_the_best_one_keeps(result):
    assert [layer.layer for layer in result.layers] == [3, 11, 18, 26]
    # 72 causal key blocks: 23 of the sink and the diagonal, at most 26 (0 2 4 4 4 4 4 4) chosen.
    assert 23 / 72 < result.density <= 49 / 72
    assert 0.9 < result.captured <= result.oracle < 1
    assert result.captured / result.oracle > 0.96


def test_the_table_shows_what_was_measured(result):
    console = Console(width=200)
    with console.capture() as caught:
        console.print(result.table())
        console.print(result.notes())
    text = " ".join(caught.get().split())
    for word in (result.needle.answer, "momo(top_k=4, exact_k=4", f"{result.captured:.2%}"):
        assert word in text
    assert f"runs from {result.crossover:,} prompt tokens on cpu" in text


def test_the_picture_is_a_png_with_both_panels(result):
    picture = image.imread(result.image)
    height, width = picture.shape[:2]
    assert (width, height) == (1210, 484)
    right = picture[:, width // 2 :, :3].reshape(-1, 3)
    orange, grey = (0xC2 / 255, 0x41 / 255, 0x0C / 255), (0xE4 / 255, 0xE7 / 255, 0xEC / 255)
    for colour in (orange, grey):
        assert (abs(right - colour).max(-1) < 0.01).sum() > 1000


@pytest.mark.parametrize("tokens", [100, 8193])
def test_a_length_that_the_model_does_not_have_is_refused(tokens):
    with pytest.raises(ArgumentError, match=f"tokens is {tokens}, needs 160 to 8192"):
        demo.run(tokens)
