"""`attnplug trace`: record what a model attends to, and make the page that shows it."""

from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from attnplug import files
from attnplug.cli.options import Device, Model, check_place, tokens_option
from attnplug.cli.output import clear_errors, console


class _TraceGroup(TyperGroup):
    """`attnplug trace MODEL` is `attnplug trace record MODEL`."""

    def resolve_command(self, ctx, args):
        if args and args[0] not in self.commands and "record" in self.commands:
            args = ["record", *args]
        return super().resolve_command(ctx, args)


trace = typer.Typer(
    cls=_TraceGroup,
    no_args_is_help=True,
    help="Record and view attention. `attnplug trace MODEL --file TEXT` records, too.",
)


@trace.command()
def record(
    model: Model,
    prompt: Annotated[str | None, typer.Option(help="The text itself.")] = None,
    file: Annotated[Path | None, typer.Option(help="A text file, UTF-8.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The trace.")] = Path("trace.parquet"),
    policy: Annotated[
        str, typer.Option(help='What serves; "momo+stream(top_k=8)" sets how to trace, too.')
    ] = "dense",
    top_k: Annotated[int, typer.Option(help="Key blocks that are kept of a query block.")] = 32,
    block: Annotated[int, typer.Option(help="Tokens a block: 16, 32, 64 or 128.")] = 64,
    weights: Annotated[str, typer.Option(help="score, mass or value.")] = "mass",
    measure: Annotated[
        int, typer.Option(help="At every n-th query measure what the edges hold; 0: do not.")
    ] = 0,
    search: Annotated[str, typer.Option(help="bounds or branches.")] = "bounds",
    gap: Annotated[
        float,
        typer.Option(help="Keep blocks with a key so many nats below a query's best; 0: keep all."),
    ] = 0.0,
    budget: Annotated[
        float, typer.Option(help="The most blocks of a list, as a share of those that are seen.")
    ] = 1.0,
    block_mask: Annotated[
        str, typer.Option(help='Blocks that may be listed: all, far, or tokens such as "64:128".')
    ] = "all",
    max_tokens: Annotated[
        int, tokens_option("--max-tokens", "Cut the text to this length; 0: do not.")
    ] = 0,
    new_tokens: Annotated[
        int, tokens_option("--new-tokens", "Tokens to generate, which are traced, too.")
    ] = 0,
    compare: Annotated[bool, typer.Option(help="Run it untraced first, and compare.")] = False,
    device: Device = None,
) -> None:
    """Record which blocks of a text a model attends to, for `attnplug trace view`."""
    with clear_errors():
        from attnplug.policies import Stream
        from attnplug.trace import command

        lists = {"gap": gap, "budget": budget, "block_mask": block_mask}
        method = Stream(top_k, block, block, weights, measure=measure, search=search, **lists)
        parsed = command.traced(policy, method)  # a typing mistake should not wait for the weights
        outcome = command.run(
            model,
            command.read_text(prompt, file),
            parsed,
            out,
            max_tokens=max_tokens,
            new_tokens=new_tokens,
            compare=compare,
            device=device,
        )
        console().print(outcome.table())
        console().print(f"see it: attnplug trace view {out}")


@trace.command()
def view(
    file: Annotated[Path, typer.Argument(help="A trace that attnplug trace wrote.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The page; next to the trace otherwise.")
    ] = None,
    mask: Annotated[
        list[str] | None,
        typer.Option(help="NAME=FILE, a trace of what a policy selects; may be repeated."),
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Such as 0-3,7; all layers otherwise.")] = None,
    sequence: Annotated[int, typer.Option(help="Row of the batch.")] = 0,
    limit_mb: Annotated[float, typer.Option(help="Megabytes that the page may have.")] = 32.0,
) -> None:
    """Make the page of a trace: one HTML file for any browser, without a network."""
    with clear_errors():
        from attnplug.trace import view as module

        is_taken = file.suffix in ("", ".html")
        page = out or (Path(f"{file}.html") if is_taken else file.with_suffix(".html"))
        check_place("out", page)
        files.make_folder(page.parent)
        size = module.write_page(
            file,
            page,
            masks=module.parse_masks(mask or []),
            layers=module.parse_layers(layers),
            sequence=sequence,
            limit_mb=limit_mb,
            progress=True,
        )
        console().print(f"{page}: {size / 1e6:.1f} MB; open it in a browser")
