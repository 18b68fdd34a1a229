"""on_load: a policy on the models of programs that load them themselves."""

from attnplug.api import Policies, apply
from attnplug.models.loading import Loading
from attnplug.policies import parse


def on_load(policy: Policies | None = None, *, fuse: bool | None = None) -> Loading:
    """Apply a policy to every model that transformers' `from_pretrained` makes from now on, in this
    process: for programs that load their models themselves, such as an evaluation harness.

    Returns a context manager, which `close()` ends, too; models that were loaded meanwhile keep
    their policies. `from_pretrained(..., attn_implementation="attnplug:momo+gather")` names the
    policy of one model, also where `policy` is None and other models stay as they are. A model that
    `apply` cannot serve, such as an encoder, stays as it is, and the log `attnplug` says why.
    `policy` and `fuse` mean what they mean in `apply`.

    Raises PolicyError: here for a text, and in from_pretrained for what does not fit the model.
    """
    if isinstance(policy, str):
        parse(policy)  # a typing mistake should not wait for the weights
    return Loading(policy, lambda model, asked: apply(model, asked, fuse=fuse))
