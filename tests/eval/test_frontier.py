"""The plot of what decode methods lose against what they read."""

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from attnplug.cli import app
from attnplug.errors import ArgumentError
from attnplug.eval.frontier import draw_frontier


def row(policy, keys, value, **changes):
    decode = policy.partition("(")[0]
    about = dict(task="kl", model="tiny", n=4096, policy=policy, served={"decode": decode})
    read = 1000 * keys if type(keys) is int else 10**7 if keys else None
    return about | dict(keys=keys, bytes=read, value=value, low=value / 2, high=value * 2) | changes


ROWS = [
    row("gather(k=16, min_tokens=0)", 896, 0.02),
    row("gather(k=4, min_tokens=0)", 704, 0.1),
    row("gather(k=4, block=64, min_tokens=0)", 2816, 0.05),
    row("mine(window=64)", 64, 0.4, low=0.0),
    row("mine(like='gather', side=1)", 300, 0.2),
    row("mine(side=1, like='sketch')", 200, 0.3),
    row("gather", 4736, 1e-9, served={"decode": "dense"}),
    row("gather(k=999, min_tokens=0)", "all", 1e-9),
    row("nearsighted", None, 0.7),
    row("gather(k=16, min_tokens=0)", 896, 0.9, task="agreement"),
    row("of-before", 5, 0.7) | {"served": {}},
]


def test_a_line_is_a_method_through_its_budgets(tmp_path, monkeypatch):
    figures = []
    own = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **o: (figures.append(self), own(self, *a, **o))[1]
    )
    path = draw_frontier(ROWS, tmp_path / "frontier.png")
    assert path.stat().st_size > 10_000
    (axes,) = figures[0].axes
    lines = [container.lines[0] for container in axes.containers]  # without intervals' ends
    drawn = {tuple(line.get_xdata()): tuple(line.get_ydata()) for line in lines}
    wanted = {(704, 896): (0.1, 0.02), (2816,): (0.05,), (64,): (0.4,), (200, 300): (0.3, 0.2)}
    assert drawn == {tuple(1000 * x for x in across): up for across, up in wanted.items()}
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    methods = ("gather", "gather(block=64)", "mine", "mine(side=1)")
    assert names == [f"{method}, 4,096 tokens" for method in methods]


@pytest.mark.parametrize("sizes", [(900, 910), (100, 6400)])
def test_sizes_are_told_along_the_axis(tmp_path, monkeypatch, sizes):
    figures = []
    monkeypatch.setattr("attnplug.files.write_figure", lambda _, figure: figures.append(figure))
    rows = [row(f"mine(window={size})", size, 0.1) for size in sizes]
    draw_frontier(rows, tmp_path / "frontier.png")
    figures[0].draw_without_rendering()
    axis = figures[0].axes[0].xaxis
    low, high = axis.get_view_interval()
    assert 2 <= sum(low <= at <= high for at in axis.get_ticklocs()) <= 12


def test_without_a_point_it_says_what_is_needed(tmp_path):
    with pytest.raises(ArgumentError, match="give --tasks fidelity"):
        draw_frontier(ROWS[6:], tmp_path / "frontier.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plot", "heat", "--tasks", "fidelity"], "plot is 'heat', needs frontier"),
        (["--plot", "frontier"], "add it to --tasks"),
    ],
)
def test_a_plot_without_its_rows_is_refused_before_the_weights(words, message):
    result = CliRunner().invoke(app, ["eval", "no-such-model", "--policy", "gather", *words])
    assert result.exit_code == 1 and message in result.stderr
