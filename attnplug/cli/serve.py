"""`attnplug serve`."""

from typing import Annotated

import typer

from attnplug.cli.options import Model
from attnplug.cli.output import clear_errors


def serve(
    model: Model,
    policy: Annotated[str, typer.Option(help='Such as "gather" or "momo+gather".')] = "gather",
    served_model_name: Annotated[
        str | None, typer.Option(help="Another name by which clients may ask for the model.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "localhost",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    continuous_batching: Annotated[
        bool, typer.Option(help="Requests share steps; without, each is a call of generate.")
    ] = True,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu, cuda or cuda:0; cuda where there is a GPU.")
    ] = None,
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
    with clear_errors():
        from attnplug import policies
        from attnplug.serve import hugging_face

        parsed = policies.parse(policy)  # a typing mistake should not wait for the weights
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
