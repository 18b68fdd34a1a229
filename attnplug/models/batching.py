"""Continuous batching on a model that has a policy: while one of its managers lives, the model's
configs name the paged attention, and `generate` is refused. `transformers serve` and
`generate_batch` come through `init_continuous_batching`, too."""

import contextlib
import copy
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager

from attnplug.errors import UnsupportedCallError
from attnplug.models.hf import bindings_of
from attnplug.models.instance_method import put_method, stock_method, take_methods
from attnplug.models.latents import EXPAND
from attnplug.models.names import ATTENTION_NAMES
from attnplug.models.paged import KEPT, adopt, paged_name, register_paged_names
from attnplug.models.picked_compressed import PICK_METHOD
from attnplug.models.picked_entries import ATTEND_METHOD
from attnplug.models.strangers import refuse_strangers
from attnplug.models.switch import ATTENTION

INIT_METHOD = "init_continuous_batching"
SESSION = "_attnplug_batching"
CACHED = "_cached_continuous_batching_manager"
# By a method that a policy has put on an attention module: what its cache keeps.
NO_PAGES = {
    EXPAND: "latents",
    PICK_METHOD: "compressed keys",
    ATTEND_METHOD: "windows and entries",
}
MOST_BLOCKS = 4096  # of a request in a block table, where neither user nor workload says how many


class Session:
    """One life of a manager: what it changed about the model, to be put back."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.manager: Callable[[], Any] = lambda: None  # weak: nobody can stop one that is lost
        self.stopped = False
        self.names: list[tuple[dict[str, Any], str]] = []

    def begin(self) -> None:
        name = paged_name(ContinuousBatchingManager)
        for module in self.model.modules():
            config = getattr(module, "config", None)
            own = {} if config is None else vars(config)
            if own.get(ATTENTION) in ATTENTION_NAMES:
                self.names.append((own, own[ATTENTION]))
                own[ATTENTION] = name
        put_method(self.model, "generate", _refuse_generate)
        vars(self.model)[SESSION] = self

    def end(self) -> None:
        for own, name in self.names:
            own[ATTENTION] = name
        self.names = []
        if vars(self.model).pop(SESSION, None) is not None:
            take_methods(self.model, "generate")

    @property
    def over(self) -> bool:
        """Whether the manager was stopped, and its thread has ended."""
        manager = self.manager()  # a thread that runs keeps its manager alive
        return manager is None or (self.stopped and not manager.is_running())


def bind_batching(model: PreTrainedModel) -> None:
    """Have this instance's managers serve its policy."""
    if hasattr(model, INIT_METHOD):
        register_paged_names()
        put_method(model, INIT_METHOD, _init_continuous_batching)


def end_batching(model: PreTrainedModel) -> None:
    """Before a policy goes: raise UnsupportedCallError while a manager lives, and forget the one
    that a model keeps for the next session, which is made for the policy."""
    _settle(model)
    if SESSION in vars(model):
        raise UnsupportedCallError("continuous batching runs on this model: stop its manager first")
    manager = vars(model).get(CACHED)
    if manager is not None and getattr(manager, SESSION, False):
        model.destroy_cached_continuous_batching_manager()  # pyright: ignore[reportCallIssue]


def _settle(model: PreTrainedModel) -> None:
    """End a session whose thread has ended since its manager was told to stop."""
    session = vars(model).get(SESSION)
    if session is not None and session.over:
        session.end()


def _refuse_generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    stock = stock_method(model, "generate")
    _settle(model)
    if SESSION not in vars(model):
        return stock(*args, **kwargs)
    raise UnsupportedCallError(
        "continuous batching runs on this model, and generate would not see its masks: add a "
        "request to the manager, or stop it first"
    )


def _init_continuous_batching(model: Any, *args: Any, **kwargs: Any) -> Any:
    """What `generate_batch` and `transformers serve` call: a manager that serves the policy."""
    refuse_strangers(model)
    _settle(model)
    if SESSION in vars(model):
        raise UnsupportedCallError("continuous batching runs on this model already: stop it first")
    for module in bindings_of(model):
        kept = next((what for name, what in NO_PAGES.items() if name in vars(module)), "")
        if kept:
            raise UnsupportedCallError(
                f"transformers' continuous batching has pages of keys and values, and the cache of "
                f"{type(module).__name__} keeps {kept}"
            )
    kept = vars(model).get(CACHED)
    if kept is not None and not getattr(kept, SESSION, False):
        raise UnsupportedCallError(
            "this model keeps a manager of continuous batching that was made before "
            "attnplug.apply: call model.destroy_cached_continuous_batching_manager() first"
        )
    stock = stock_method(model, INIT_METHOD)
    signature = inspect.signature(type(model).init_continuous_batching)
    given = signature.bind(model, *args, **kwargs).arguments
    asked = given.get("continuous_batching_config")
    if asked is not None:  # the user's own stays as it is
        own = copy.copy(asked)
        args = tuple(own if each is asked else each for each in args)
        kwargs = {name: own if each is asked else each for name, each in kwargs.items()}
    session = Session(model)
    with contextlib.ExitStack() as undo:
        session.begin()
        undo.callback(session.end)
        manager = stock(*args, **kwargs)
        session.manager = weakref.ref(manager)
        if manager is not kept:
            _configure(model, manager, asked, given.get("workload_hints"))
            _watch(model, manager)
        undo.pop_all()
    return manager


def _policies(model: PreTrainedModel) -> dict[int, Any]:
    """The policy of each layer, None for one that is left to the model."""
    bound: dict[Any, Any] = bindings_of(model)
    return {module.layer_idx: binding.policy for module, binding in bound.items()}


def _configure(model: Any, manager: Any, asked: Any, hints: Any) -> None:
    """Set what transformers decides by names of its own attentions, unless the user has."""
    config, policies = manager.continuous_batching_config, _policies(model)
    config.max_blocks_per_request = _blocks_a_request(model, config, policies, asked, hints)
    if not all(policy is None or policy.shares_pages for policy in policies.values()):
        config.allow_block_sharing = manager._use_prefix_sharing = False
    if model.device.type != "cuda":
        return
    graphs = None if asked is None else asked.use_cuda_graph
    of_steps = graphs[1] if isinstance(graphs, tuple) else graphs is not False
    # A batch with prompts looks at its lengths on the host, a step of decoding does not.
    config.use_cuda_graph = (False, bool(of_steps) and config.max_blocks_per_request > 0)
    if asked is None or asked.max_memory_percent is None:
        size = torch.empty((), dtype=model.dtype, device="cpu").element_size()
        shares = [policy.page_phase.page_share(size) for policy in policies.values() if policy]
        config.max_memory_percent /= 1 + max(shares, default=0.0)


def _blocks_a_request(
    model: Any, config: Any, policies: dict[int, Any], asked: Any, hints: Any
) -> int:
    """How many blocks of a request a block table has room for; 0: transformers makes none."""
    if any(policy is None for policy in policies.values()):
        return 0
    if asked is not None and asked.max_blocks_per_request is not None:
        return asked.max_blocks_per_request
    page = getattr(config, "page_size", 0) or config.block_size
    tokens = getattr(model.config.get_text_config(), "max_position_embeddings", 0)
    if hints is not None and hints.max_prompt_length + hints.max_generated_length > 0:
        tokens = hints.max_prompt_length + hints.max_generated_length
    return min(-(-tokens // page) + 1, MOST_BLOCKS)


def _watch(model: Any, manager: Any) -> None:
    """Adopt the paged cache that the manager makes, and end the session when it stops."""
    setattr(manager, SESSION, True)
    make = manager._create_batch_processor

    def create() -> Any:
        processor = make()
        cache, stream = processor.cache, processor.inputs_and_outputs.compute_stream
        if KEPT not in vars(cache):
            served = {x: policy for x, policy in _policies(model).items() if policy is not None}
            adopt(cache, served, processor.offloading_manager, lambda: torch.cuda.stream(stream))
        return processor

    manager._create_batch_processor = create
    manager.start = _starting(model, manager, manager.start)
    for name in ("stop", "destroy"):
        setattr(manager, name, _ending(model, manager, getattr(manager, name)))


def _starting(model: Any, manager: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    """A manager that was stopped may be started again, as transformers' may: a session anew."""
    served = _policies(model)

    def start(*args: Any, **kwargs: Any) -> Any:
        _settle(model)
        if _policies(model) != served:
            raise UnsupportedCallError("this manager is of a policy that has gone: make another")
        session = vars(model).get(SESSION)
        with contextlib.ExitStack() as undo:
            if session is None:
                session = Session(model)
                session.begin()
                undo.callback(session.end)
                session.manager = weakref.ref(manager)
            elif session.manager() is not manager:
                raise UnsupportedCallError("another manager runs on this model: stop it first")
            session.stopped = False
            stock(*args, **kwargs)
            undo.pop_all()

    return start


def _ending(model: Any, manager: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    def end(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        session = vars(model).get(SESSION)
        if session is not None and session.manager() is manager:
            session.stopped = True
        _settle(model)
        return result

    return end
