"""`attnplug serve`: an OpenAI-compatible server of one model under a policy, made of the parts of
transformers' own, `transformers serve`. Requests are batched continuously unless told otherwise."""

from attnplug.serve.hugging_face.server import Options, run

__all__ = ["Options", "run"]
