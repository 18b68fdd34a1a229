"""The `attnplug` command: demo, report, eval, bench, plan, serve, trace, doctor. Errors are one
line on stderr and exit code 1."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer.core import TyperGroup

from attnplug import files
from attnplug.errors import AttnplugError

# torch and transformers take seconds to import: each command imports what it needs, so that
# --help answers at once.
app = typer.Typer(
    name="attnplug",
    help="Training-free attention policies for long-context inference on Hugging Face models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Device = Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")]
IMAGES = (".png", ".svg", ".pdf")


def _console() -> Console:
    """Prints what it is given: a file may be named [red].png."""
    return Console(markup=False, highlight=False)


def _print_error(error: object) -> None:
    text = f"error: {error}".encode(errors="backslashreplace").decode()
    Console(stderr=True, soft_wrap=True, markup=False, highlight=False).print(text, style="red")


@contextlib.contextmanager
def _clear_errors() -> Iterator[None]:
    try:
        yield
    except (AttnplugError, OSError) as error:  # a disk may fill while something is written
        _print_error(error)
        raise typer.Exit(1) from error


def _check_least(option: str, value: int, least: int) -> None:
    from attnplug.errors import ArgumentError

    if value < least:
        raise ArgumentError(f"{option} is {value}, needs at least {least}")


def _check_place(option: str, path: Path, *, folder: bool = False, image: bool = False) -> None:
    """A place that cannot be written should not wait for the work."""
    from attnplug.errors import ArgumentError

    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    fits = there.is_dir() == (folder or there != path)
    if not fits or not os.access(there, os.W_OK):
        kind = "a folder" if folder else "a file"
        raise ArgumentError(f"{option} is {path}, where {kind} cannot be written")
    if image and path.suffix.lower() not in IMAGES:
        raise ArgumentError(f"{option} is {path}, needs a name that ends in {', '.join(IMAGES)}")


def _check_weights(model: str) -> None:
    """A small model whose weights are not converted yet needs gguf: say so before they are
    fetched."""
    from attnplug.extras import require
    from attnplug.models import pretrained

    if model in pretrained.names() and not pretrained.checkpoint_dir(model).is_dir():
        require("demo", f"to convert the weights of {model}, attnplug")


@app.command()
def demo(
    tokens: Annotated[
        int | None, typer.Option(help="Prompt length; 4096 on a CPU, 8192 on a GPU.")
    ] = None,
    top_k: Annotated[int, typer.Option(help="Key blocks that momo keeps per query block.")] = 16,
    device: Device = None,
    image: Annotated[Path, typer.Option(help="Where to save the block mask's picture.")] = Path(
        "attnplug-demo.png"
    ),
) -> None:
    """SmolLM2 finds a number hidden in a long text: stock, and with momo's block-sparse prefill."""
    with _clear_errors():
        from attnplug import demo as module

        _check_place("image", image, image=True)
        result = module.run(tokens, top_k=top_k, device=device, image=image)
        console = _console()
        console.print(result.table())
        console.print(result.notes())


@app.command()
def report(
    model: Annotated[str, typer.Argument(help="smollm2-135m, gemma3-270m, a folder or a hub id.")],
    policy: Annotated[str, typer.Option(help='Such as "momo" or "momo(gamma=32)".')] = "momo",
    steps: Annotated[
        int, typer.Option(help="Decode so many tokens; show what the cache's layers counted.")
    ] = 0,
    tokens: Annotated[int, typer.Option(help="Tokens of prose before those steps.")] = 512,
    device: Device = "cpu",
) -> None:
    """What a policy would do on each attention layer of a model, and why not where it would not."""
    with _clear_errors():
        import torch

        from attnplug import api, policies
        from attnplug.models.pretrained import load

        # A typing mistake should not wait for the weights.
        parsed = policies.parse(policy)
        _check_least("steps", steps, 0)
        _check_least("tokens", tokens, 1)
        _check_weights(model)
        network, tokenizer = load(model, dtype=torch.bfloat16, device=device)
        with api.applied(network, parsed):
            _console().print(api.report(network).table())
            if steps > 0:
                from attnplug import telemetry

                tables = telemetry.run(network, tokenizer, tokens, steps)
                _console().print(*tables or ["No layer counts anything: see the notes above."])


@app.command()
def eval(
    model: Annotated[str, typer.Argument(help="smollm2-135m, gemma3-270m, a folder or a hub id.")],
    policy: Annotated[
        list[str] | None, typer.Option(help='Such as "momo" or "random_blocks"; may be repeated.')
    ] = None,
    policies: Annotated[
        str | None, typer.Option(help="all: dense and every method's default at every length.")
    ] = None,
    suite: Annotated[
        str | None, typer.Option(help="default: the whole quality table; options below override.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Names with commas between, or: all. Else two needles.")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Prompt lengths with commas between; else 1024.")
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="Prompts for each task and length; else 10.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Other prompts for another seed.")] = 0,
    batch: Annotated[int, typer.Option(help="Prompts at once; 0: what the device takes.")] = 0,
    limit_seconds: Annotated[
        float | None, typer.Option(help="Begin no batch after that many seconds.")
    ] = None,
    claims: Annotated[
        Path | None, typer.Option(help="Folder by which several processes share a study's batches.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for samples and results.")] = Path(
        "attnplug-eval"
    ),
    device: Device = None,
) -> None:
    """Dense and policies on the same prompts: scores, paired statistics, tables, a heat map."""
    with _clear_errors():
        from attnplug.eval import command

        asked = command.Asked(policy or [], policies, suite, tasks, lengths, trials)
        study = command.make_study(asked, seed, batch, limit_seconds, claims)
        _check_place("out", out, folder=True)
        if claims is not None:
            _check_place("claims", claims, folder=True)
        _check_weights(model)
        command.run(model, study, out, device, _console())


@app.command()
def bench(
    quick: Annotated[
        bool, typer.Option("--quick", help="One layer at a few lengths: a couple of minutes.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Whose heads; smollm2-135m, a folder or a hub id.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cuda, or cpu: the ops' references at short lengths.")
    ] = "cuda",
    out: Annotated[Path, typer.Option(help="Folder for rows and plot.")] = Path("attnplug-bench"),
) -> None:
    """Your own speed table: decode and prefill of one layer beside torch's attention."""
    with _clear_errors():
        from attnplug.bench import command

        problem = command.problem(quick, device)
        if problem:
            _print_error(problem)
            raise typer.Exit(2)
        _check_place("out", out, folder=True)
        if model is not None:
            _check_weights(model)
        command.run(command.heads_of(model), device, out, _console())


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(help="qwen2.5-7b, llama-3.1-8b, smollm2-135m, a folder or a hub id.")
    ],
    context: Annotated[
        str, typer.Option(help="Tokens of context, with commas between.")
    ] = "8192,32768,131072,524288,1048576",
    batch: Annotated[int, typer.Option(help="Sequences that are decoded together.")] = 1,
    policy: Annotated[str, typer.Option(help='A gather policy, such as "gather(k=8)".')] = "gather",
    rows: Annotated[
        list[Path] | None,
        typer.Option(help="Benchmark JSON to fit the bill to; an H200's bill without."),
    ] = None,
    image: Annotated[
        Path | None, typer.Option(help="Where to save a map over contexts and batches.")
    ] = None,
) -> None:
    """What decode would cost with dense attention and with gather, and from which length it pays.

    Reads no weights and runs nothing: a bill of bytes, fitted to measured steps of a machine."""
    with _clear_errors():
        from attnplug import plan as module
        from attnplug.extras import require

        console = _console()
        if image is not None:
            require("plot", "plan --image")
            _check_place("image", image, image=True)
        contexts, method = module.read_options(context, batch, policy)
        _check_weights(model)
        shape, bill = module.shape_of(model), module.H200
        if rows:
            fitted = module.fit(module.read_rows(rows))
            bill = fitted.bill
            console.print(module.summary(fitted))
        console.print(module.table(shape, bill, method, batch, contexts))
        console.print(module.notes(shape, bill, method, batch))
        if image is not None:
            files.make_folder(image.parent)
            module.draw_map(shape, bill, method, image)
            console.print(f"map: {image}")


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="smollm2-135m, gemma3-270m, a folder or a hub id.")],
    policy: Annotated[str, typer.Option(help='Such as "gather" or "momo+gather".')] = "gather",
    served_model_name: Annotated[
        str | None, typer.Option(help="Another name by which clients may ask for the model.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "localhost",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    continuous_batching: Annotated[
        bool, typer.Option(help="Requests share steps; without, each is a call of generate.")
    ] = True,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:0.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, or such as bfloat16.")] = None,
    cb_block_size: Annotated[int | None, typer.Option(help="Tokens of a page.")] = None,
    cb_num_blocks: Annotated[int | None, typer.Option(help="Pages of the cache.")] = None,
    cb_max_batch_tokens: Annotated[int | None, typer.Option(help="Tokens of a batch.")] = None,
    cb_max_memory_percent: Annotated[
        float | None, typer.Option(help="Share of the GPU's memory for the cache, 0 to 1.")
    ] = None,
    quantization: Annotated[str | None, typer.Option(help="bnb-4bit or bnb-8bit.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that the checkpoint brings.")
    ] = False,
    reasoning: Annotated[str | None, typer.Option(help="on, off or auto.")] = None,
    chat_template_kwargs: Annotated[
        str | None, typer.Option(help="JSON object for the chat template of every request.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of sampling.")] = None,
    cors: Annotated[
        bool, typer.Option("--cors", help="Let pages of any site ask, from a browser.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="Of transformers: info, warning...")] = "warning",
) -> None:
    """An OpenAI-compatible server of one model with a policy, by transformers' own handlers.

    Answers /v1/chat/completions, /v1/completions and /v1/responses; /v1/models, /health and
    /metrics tell of it. Ctrl-C or SIGTERM ends it, requests in flight included."""
    with _clear_errors():
        from attnplug import policies
        from attnplug.serve import hugging_face

        parsed = policies.parse(policy)  # a typing mistake should not wait for the weights
        _check_weights(model)
        options = hugging_face.Options(
            served_model_name=served_model_name,
            host=host,
            port=port,
            continuous_batching=continuous_batching,
            device=device,
            dtype=dtype,
            cb_block_size=cb_block_size,
            cb_num_blocks=cb_num_blocks,
            cb_max_batch_tokens=cb_max_batch_tokens,
            cb_max_memory_percent=cb_max_memory_percent,
            quantization=quantization,
            trust_remote_code=trust_remote_code or None,
            reasoning=reasoning,
            chat_template_kwargs=chat_template_kwargs,
            default_seed=seed,
            enable_cors=cors or None,
            log_level=log_level,
        )
        hugging_face.run(model, parsed, options)


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
app.add_typer(trace, name="trace")


@trace.command()
def record(
    model: Annotated[str, typer.Argument(help="smollm2-135m, gemma3-270m, a folder or a hub id.")],
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
        int, typer.Option(help="Measure what the edges hold on every so many-th query; 0: don't.")
    ] = 0,
    search: Annotated[str, typer.Option(help="bounds or branches.")] = "bounds",
    max_tokens: Annotated[int, typer.Option(help="Cut the text to so many tokens.")] = 0,
    new_tokens: Annotated[int, typer.Option(help="Generate so many tokens, traced too.")] = 0,
    compare: Annotated[bool, typer.Option(help="Run it untraced first, and compare.")] = False,
    device: Device = None,
) -> None:
    """Record which blocks of a text a model attends to, for `attnplug trace view`."""
    with _clear_errors():
        from attnplug.policies import Stream
        from attnplug.trace import command

        method = Stream(top_k, block, block, weights, measure=measure, search=search)
        parsed = command.traced(policy, method)  # a typing mistake should not wait for the weights
        _check_weights(model)
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
        _console().print(outcome.table())
        _console().print(f"see it: attnplug trace view {out}")


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
    with _clear_errors():
        from attnplug.trace import view as module

        is_taken = file.suffix in ("", ".html")
        page = out or (Path(f"{file}.html") if is_taken else file.with_suffix(".html"))
        _check_place("out", page)
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
        _console().print(f"{page}: {size / 1e6:.1f} MB; open it in a browser")


@app.command()
def doctor() -> None:
    """Versions, GPU, compiler, weights, and whether the ops compute the right thing here."""
    from attnplug import doctor as module

    checks = module.examine()
    _console().print(module.table(checks))
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)
