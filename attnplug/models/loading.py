"""A policy on every model that a program loads, for programs that call `from_pretrained` out of
reach: an evaluation harness, a server, a pipeline."""

import functools
import logging
from collections.abc import Callable
from typing import Any, ClassVar, Self

from transformers import PreTrainedConfig, PreTrainedModel

from attnplug.errors import UnsupportedModelError

LOG = logging.getLogger("attnplug")
NAME = "from_pretrained"
PREFIX = "attnplug:"  # of an attn_implementation that names a policy
Apply = Callable[[PreTrainedModel, Any], Any]


class Loading:
    """While it is open, each model that `from_pretrained` makes is given to `serve` with a policy:
    the policy that its `attn_implementation="attnplug:POLICY"` names, or else `policy`, unless that
    is None. A context manager; `close` ends it, and models that were loaded meanwhile keep their
    policies. Where several are open, the newest decides."""

    _open: ClassVar[list["Loading"]] = []
    _own: ClassVar[dict[str, Any]] = {}  # from_pretrained as transformers has it, while any is open

    def __init__(self, policy: Any, serve: Apply) -> None:
        self.policy, self.serve = policy, serve
        if not Loading._open:
            own = Loading._own[NAME] = vars(PreTrainedModel)[NAME]
            setattr(PreTrainedModel, NAME, classmethod(_wrapped(own.__func__)))
        Loading._open.append(self)

    def close(self) -> None:
        """Let `from_pretrained` be as it was. Closing twice does nothing."""
        if self in Loading._open:
            Loading._open.remove(self)
            if not Loading._open:
                setattr(PreTrainedModel, NAME, Loading._own.pop(NAME))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _wrapped(from_pretrained: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' function, and then the policy of whichever `Loading` is open."""

    @functools.wraps(from_pretrained)
    def load(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        opened = Loading._open[-1] if Loading._open else None
        asked = _asked(kwargs)
        loaded = from_pretrained(cls, *args, **kwargs)
        policy = asked or (opened.policy if opened else None)
        if opened is not None and policy is not None:
            model = loaded[0] if isinstance(loaded, tuple) else loaded  # with its loading info
            try:
                opened.serve(model, policy)
            except UnsupportedModelError as error:
                LOG.warning("%s stays as it is: %s", type(model).__name__, error)
        return loaded

    return load


def _asked(kwargs: dict[str, Any]) -> str | None:
    """The policy that `attn_implementation` names, which is taken out: transformers must not look
    for an attention of that name. An Auto class has put it into the config by now."""
    config = kwargs.get("config")
    config = config if isinstance(config, PreTrainedConfig) else None
    name = kwargs.get("attn_implementation") or (config and config._attn_implementation)
    if not (isinstance(name, str) and name.startswith(PREFIX)):
        return None
    kwargs.pop("attn_implementation", None)
    if config is not None:
        config._attn_implementation = None
    return name.removeprefix(PREFIX)
