"""The commands that measure, count or tell: demo, report, plan, eval, bench, tune, calibrate and
doctor."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from attnplug import __version__, files
from attnplug.cli.options import (
    Device,
    Json,
    Lengths,
    Model,
    check_count,
    check_place,
    lengths_option,
    read_lengths,
    tokens_option,
)
from attnplug.cli.output import clear_errors, console, print_error, print_json, quiet_log

CONTEXTS_TEXT = "8K,32K,128K,512K,1M"
CONTEXTS = read_lengths(CONTEXTS_TEXT)


def demo(
    tokens: Annotated[int | None, tokens_option("--tokens", "4K on a CPU, 8K on a GPU.")] = None,
    top_k: Annotated[int, typer.Option(help="Key blocks that momo keeps per query block.")] = 16,
    device: Device = None,
    image: Annotated[Path, typer.Option(help="Where to save the block mask's picture.")] = Path(
        "attnplug-demo.png"
    ),
) -> None:
    """SmolLM2 finds a number hidden in a long text: stock, and with momo's block-sparse prefill."""
    with clear_errors():
        from attnplug import demo as module

        check_place("image", image, image=True)
        result = module.run(tokens, top_k=top_k, device=device, image=image)
        if result.device == "cpu":
            console().print(module.ON_A_CPU)
        console().print(result.table())
        console().print(result.notes())


def report(
    model: Model,
    policy: Annotated[str, typer.Option(help='Such as "momo" or "momo(gamma=32)".')] = "momo",
    steps: Annotated[
        int, typer.Option(help="Tokens to decode, to show what the cache's layers count.")
    ] = 0,
    tokens: Annotated[int, tokens_option("--tokens", "Tokens of prose before these steps.")] = 512,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """What a policy would do on each attention layer of a model, and why not where it would not."""
    with clear_errors():
        import torch

        from attnplug import api, policies
        from attnplug.models.pretrained import load

        # A typing mistake should not wait for the weights.
        parsed = policies.parse(policy)
        check_count("steps", steps, 0)
        check_count("tokens", tokens, 1)
        network, tokenizer = load(model, dtype=torch.bfloat16, device=device)
        with quiet_log(), api.applied(network, parsed):
            from attnplug import telemetry

            found = api.report(network)
            counted = telemetry.run(network, tokenizer, tokens, steps) if steps > 0 else None
        if as_json:
            counts = {} if counted is None else {"counted": dataclasses.asdict(counted)}
            print_json(dataclasses.asdict(found) | counts)
            return
        console().print(found.table())
        if counted is not None:
            none = "No layer counts anything: see the notes above."
            console().print(*counted.tables() or [none])


def eval(
    model: Model,
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
    harness: Annotated[
        str | None,
        typer.Option(help="Tasks of lm-evaluation-harness instead, such as niah_single_1."),
    ] = None,
    lengths: Annotated[
        Lengths | None,
        lengths_option(
            "--lengths", 'Prompt lengths with commas between, such as "4K,32K"; else 1K.'
        ),
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
    plot: Annotated[
        str | None,
        typer.Option(help="frontier: KL against bytes a step, of the task fidelity."),
    ] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Dense and policies on the same prompts: scores, paired statistics, tables, a heat map."""
    with clear_errors():
        from attnplug.eval import command

        asked = command.Asked(policy or [], policies, suite, tasks, lengths, trials, harness)
        if harness is None:
            study = command.make_study(asked, seed, batch, limit_seconds, claims)
            command.check_plot(plot, study)
        else:
            own = {"limit-seconds": limit_seconds, "claims": claims, "plot": plot}
            study = command.make_harness(asked, seed, batch, **own)
        check_place("out", out, folder=True)
        if claims is not None:
            check_place("claims", claims, folder=True)
        written = command.run(model, study, out, device, console(stderr=as_json), plot)
        if as_json:
            typer.echo(written[0].read_text(), nl=False)  # rows.json


def bench(
    quick: Annotated[
        bool, typer.Option("--quick", help="One layer at a few lengths: a couple of minutes.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Whose heads; smollm2-135m, a folder or a hub id.")
    ] = None,
    lengths: Annotated[
        Lengths | None,
        lengths_option(
            "--lengths", 'Tokens, with commas: "32K,1M"; else some that suit the device.'
        ),
    ] = None,
    device: Device = None,
    out: Annotated[Path, typer.Option(help="Folder for rows and plot.")] = Path("attnplug-bench"),
) -> None:
    """Your own speed table: decode and prefill of one layer beside torch's attention.

    On a CPU it times the ops' references, at short lengths."""
    with clear_errors():
        from attnplug.bench import command
        from attnplug.models.device import default_device

        device = default_device() if device is None else device
        _refuse(command.problem(device, quick=quick))
        check_place("out", out, folder=True)
        command.run(command.heads_of(model), device, out, console(), lengths)


def _refuse(problem: str) -> None:
    """End with exit code 2, as wrong usage does, where there is a problem."""
    if problem:
        print_error(problem)
        raise typer.Exit(2)


def tune(
    model: Annotated[
        str | None,
        typer.Argument(help="Whose heads; smollm2-135m, a folder or a hub id. Else Qwen2.5-7B's."),
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="A method to measure, such as gather; all without.")
    ] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Measure from which length on each method pays on this machine, and keep it for `apply`.

    A method's own crossovers were measured on an H200. Times a layer's step and prompt at a few
    lengths, which takes some minutes where kernels must be compiled; `attnplug report` says where a
    crossover comes from."""
    with clear_errors():
        from attnplug.bench import command
        from attnplug.bench import tune as module
        from attnplug.models.device import default_device

        device = default_device() if device is None else device
        _refuse(command.problem(device))
        heads = command.heads_of(model)
        found = module.run(heads, device, method or [], console(stderr=as_json))
        if as_json:
            print_json(found)


def calibrate(model: Model, device: Device = None, as_json: Json = False) -> None:
    """Make the basis of a model's keys that sketch has once for all prompts, and keep it.

    Reads eight kinds of text, 2,048 tokens each: seconds on a GPU, a minute or more on a CPU. The
    file lies in attnplug's cache folder, under a fingerprint of the weights."""
    with clear_errors():
        from attnplug.calibration import command

        made = command.calibrate(model, device)
        if as_json:
            print_json(made._asdict() | {"path": str(made.path)})
        else:
            console().print(
                f"basis: {made.path} ({made.layers} layers, {made.heads} KV heads, of "
                f"{made.tokens:,} tokens, in {made.seconds:.0f} s)",
                soft_wrap=True,
            )


def plan(
    model: Annotated[
        str, typer.Argument(help="qwen2.5-7b, llama-3.1-8b, smollm2-135m, a folder or a hub id.")
    ],
    context: Annotated[
        Lengths,
        lengths_option(
            "--context", "Tokens of context, with commas between.", show_default=CONTEXTS_TEXT
        ),
    ] = CONTEXTS,
    batch: Annotated[int, typer.Option(help="Sequences that are decoded together.")] = 1,
    policy: Annotated[
        str, typer.Option(help='auto or any policy: "gather(k=8)", certified, "momo+exact".')
    ] = "gather",
    gpus: Annotated[int, typer.Option(help="GPUs that share the model by its heads.")] = 1,
    rows: Annotated[
        list[Path] | None,
        typer.Option(help="Benchmark JSON to fit the bill to; an H200's bill without."),
    ] = None,
    image: Annotated[
        Path | None, typer.Option(help="Where to save a map over contexts and batches.")
    ] = None,
    accepted: Annotated[
        float, typer.Option(help="For exact: the chance with which dense accepts a draft.")
    ] = 0.906,
    as_json: Json = False,
) -> None:
    """What decode would cost in time and memory, dense and with a policy, and where that pays.

    Reads no weights and runs nothing: a bill of bytes, fitted to measured steps of a machine."""
    with clear_errors():
        from attnplug import plan as module
        from attnplug import plan_answer
        from attnplug.extras import require
        from attnplug.plan_map import draw_map

        if image is not None:
            require("plot", "plan --image")
            check_place("image", image, image=True)
        named = plan_answer.read_options(context, batch, policy, accepted)
        shape, bill = module.shape_of(model).of_rank(gpus), module.H200
        said = console(stderr=as_json)
        if rows:
            fitted = module.fit(module.read_rows(rows))
            bill = fitted.bill
            said.print(module.summary(fitted))
        asked = plan_answer.plan_for(shape, bill, named, batch, accepted)
        drawn = None if image is None else plan_answer.mapped(asked.method)
        if as_json:
            print_json({"model": model} | plan_answer.facts(asked, context))
        else:
            said.print(*plan_answer.tables(asked, context), plan_answer.notes(asked), sep="\n")
        if image is not None and drawn is not None:
            files.make_folder(image.parent)
            draw_map(shape, bill, drawn, image)
            said.print(f"map: {image}")


def doctor(as_json: Json = False) -> None:
    """Versions, GPU, compiler, weights, and whether the ops compute the right thing here."""
    from attnplug import doctor as module

    said = "running the ops; the first time on this machine their kernels are compiled"
    console(stderr=True).print(said, soft_wrap=True)
    checks = module.examine()
    with clear_errors():
        if as_json:
            facts = [dataclasses.asdict(check) for check in checks]
            print_json({"version": __version__, "checks": facts})
        else:
            console().print(module.table(checks))
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)
