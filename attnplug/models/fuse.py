"""Projections of one input as one matrix product: q, k and v, and an MLP's gate and up.

`pack` lays the weights of such a group behind each other in one buffer. The parameters stay the
model's own, as views of it, so that nothing is stored twice, and names, checkpoints and adapters
are what they were. Nothing else is kept: whether a group is packed is read off the addresses of
its parameters, before each call of generate. What has moved since (`to`, `load_state_dict` with
`assign`, a deepcopy) is packed again, and what no longer fits decodes unfused.

Only attnplug's own decode loop multiplies by a whole buffer: it can look at addresses before it
runs compiled steps, where code that somebody else compiled cannot.

Under tensor parallelism the loop sees a rank's part of each weight as a plain parameter. Where the
plan leaves each rank its own part of the output, transformers' forward of a projection does no more
than the product, and is set aside as any other is.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import linear

from attnplug.models.parallel import (
    follow_local_weights,
    is_of_ranks,
    is_split,
    keeps_parts,
    local_weights,
)

# Where a token of generate takes less time so: a step of a 7B model on an H200 8 to 9% less.
FASTER = frozenset({"cuda"})
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
TENSORS = ("weight", "bias")


class Part:
    """One projection of a group, and the forward that it has while a step runs: the first
    multiplies its input by all of the buffer, the others take their part of that."""

    def __init__(self, group: "Group", module: torch.nn.Linear, index: int):
        self.group, self.module, self.index = group, module, index
        self.instead = self.forward  # one object, as compiled steps are guarded by it

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input @ weight.T + bias` of this projection, `[..., N]`. Other threads may run the model
        at the same time: what is not of this input is not taken."""
        group, module, weight = self.group, self.module, self.group.weight
        if self.index == 0 and weight is not None:
            products = linear(input, weight, group.bias).split(group.widths, -1)
            group.last = input, products
            return products[0]
        last = group.last
        if last is None or last[0] is not input:
            return linear(input, module.weight, module.bias)
        if self.index == len(group.widths) - 1:
            group.last = None  # a compiled step must not return it
        return last[1][self.index]


class Group:
    """Projections of one module, by name; while a step runs their weights and biases as one tensor,
    which nobody may keep for longer than that, and the last input and products."""

    def __init__(self, owner: torch.nn.Module, path: str, names: tuple[str, ...]):
        self.owner, self.path, self.names = owner, path, names
        self.parts: tuple[Part, ...] = ()
        self.seen: tuple[Any, ...] = ()  # of the projections, when they were last packed
        self.widths: list[int] = []
        self.weight: Any = None
        self.bias: Any = None
        self.last: tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None = None

    def modules(self) -> list[Any]:
        """The projections themselves, out of the adapters that may be about them (PEFT's)."""
        found = [self.owner._modules[name] for name in self.names]
        return [getattr(module, "base_layer", module) for module in found]

    def look(self) -> tuple[Any, ...]:
        """What a user's change to a packed group would show in: an address, a shape, a class, a
        hook or another forward."""
        return tuple(
            (
                id(module),
                type(module),
                "_hf_hook" in vars(module),
                vars(module).get("forward"),
                *(
                    None if each is None else (each.data_ptr(), each.shape, type(each))
                    for each in vars(module)["_parameters"].values()
                ),
            )
            for module in self.modules()
        )

    def refusal(self) -> str:
        """Why these cannot be one product; "" where they can."""
        modules = self.modules()
        strange = [type(each).__name__ for each in modules if type(each) is not torch.nn.Linear]
        if strange:
            return f"a projection is a {strange[0]}"
        if any(hasattr(each, "_hf_hook") or _is_replaced(each) for each in modules):
            return "accelerate's hook or another forward is on a projection"
        if len({each.in_features for each in modules}) > 1:
            return "the projections have inputs of different widths"
        if len({each.bias is None for each in modules}) > 1:
            return "only some of the projections have a bias"
        tensors = [vars(each)["_parameters"].get(name) for name in TENSORS for each in modules]
        present = [each for each in tensors if each is not None]
        if len(present) != len(modules) * (1 if modules[0].bias is None else 2):
            return "a weight is computed, not a parameter"
        return _unpackable(present) or ("" if self._fits() else "a weight shares its memory")

    def _fits(self) -> bool:
        """Whether every tensor is the only one in its memory, or lies as `pack` lays it: others of
        its group may have moved since, and pickle gives each the whole buffer."""
        return all(
            _is_alone(each) or _is_laid(each, rows) for rows in self._tensors() for each in rows
        )

    def _tensors(self) -> list[list[torch.Tensor]]:
        modules = self.modules()
        names = [name for name in TENSORS if getattr(modules[0], name) is not None]
        return [[getattr(each, name) for each in modules] for name in names]

    def pack(self) -> bool:
        """Lay the tensors of a group that has no refusal behind each other, and say whether any had
        to move; a group that lies so costs a look at addresses."""
        modules = self.modules()
        if [part.module for part in self.parts] != modules:
            self.parts = tuple(Part(self, each, index) for index, each in enumerate(modules))
        self.widths = [len(each.weight) for each in modules]  # a rank's
        loose = [tensors for tensors in self._tensors() if not _is_packed(tensors)]
        for tensors in loose:
            _lay(tensors)
        return bool(loose)

    def open(self) -> None:
        """Have the weights and biases of a packed group as one tensor. Compiled steps take it as an
        input: of a narrow one, read on past its end, inductor times kernels on as little memory."""
        first = self.modules()[0]
        for name in TENSORS:
            narrow = getattr(first, name)
            if narrow is not None:
                size = (sum(self.widths), *narrow.shape[1:])
                wide = narrow.detach().as_strided(size, narrow.stride())
                torch._dynamo.mark_static(wide)
                torch._dynamo.mark_static_address(wide, guard=False)
                setattr(self, name, wide)

    def close(self) -> None:
        """Forget what `open` and steps have made: memory that weights leave must be free."""
        self.weight = self.bias = self.last = None

    def unpack(self) -> None:
        """Give each tensor memory of its own again."""
        for part in self.parts:
            for name in TENSORS:
                tensor = getattr(part.module, name, None)
                if tensor is not None and not _is_alone(tensor):
                    tensor.data = tensor.data.clone()
        self.parts = ()


@dataclass
class Fusion:
    """The groups of a model: those that decode as one product, and why others do not. `asked`: on
    every device, and at once; else where it is faster, from the first call of generate on."""

    groups: list[Group] = field(default_factory=list)
    asked: bool = True
    fused: list[Group] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, model: torch.nn.Module, asked: bool = True) -> "Fusion":
        """The groups of a model, packed where they can be if that was asked for."""
        groups = [
            Group(module, path, names)
            for path, module in model.named_modules()
            for names in GROUPS
            if all(isinstance(getattr(module, name, None), torch.nn.Module) for name in names)
        ]
        fusion = cls(groups, asked)
        if asked and not is_split(model):  # whose weights are a loop's only while it runs
            fusion.pack(model)
        return fusion

    @torch.inference_mode(False)  # parameters would not be ones any more
    @torch.no_grad()
    def pack(self, model: torch.nn.Module) -> None:
        """Pack what can be and note the rest; a look at addresses where nothing has moved."""
        before = {id(group): group.seen for group in self.fused}
        self.fused, self.refused = [], Counter()
        device = next(model.parameters()).device
        if not self.asked and device.type not in FASTER:
            return
        moved = False
        for group in self.groups:
            if id(group) in before and group.look() == before[id(group)]:
                self.fused.append(group)
                continue
            gathers = not all(keeps_parts(model, f"{group.path}.{name}") for name in group.names)
            why = "the ranks gather what a projection gives" if gathers else group.refusal()
            try:
                moved |= not why and group.pack()
            except torch.OutOfMemoryError:
                why = "the device has no room to move weights to"
            if why:
                self.refused[why] += 1
            else:
                group.seen = group.look()
                self.fused.append(group)
        if moved:
            follow_local_weights(model)
        if moved and device.type == "cuda":
            torch.cuda.empty_cache()  # where the narrow weights were, nothing as wide has room

    @torch.inference_mode(False)
    @torch.no_grad()
    def unpack(self, model: torch.nn.Module) -> None:
        """Undo `pack`."""
        with local_weights(model):
            for group in self.groups:
                group.unpack()
            follow_local_weights(model)
        self.fused = []

    def key(self) -> tuple[int, ...]:
        """Which projections are fused: a step that was compiled for others is not this one."""
        return tuple(id(part.module) for group in self.fused for part in group.parts)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Within it the fused groups multiply once. Their addresses must have been looked at."""
        parts = [part for group in self.fused for part in group.parts]
        before = [vars(part.module).get("forward") for part in parts]
        for group in self.fused:
            group.open()
        for part in parts:
            vars(part.module)["forward"] = part.instead
        try:
            yield
        finally:
            for part, forward in zip(parts, before, strict=True):
                del vars(part.module)["forward"]
                if forward is not None:
                    vars(part.module)["forward"] = forward
            for group in self.fused:
                group.close()

    def __str__(self) -> str:
        """One line for `report`."""
        counts = Counter(", ".join(group.names) for group in self.fused)
        texts = [f"one product for {names} in {count} layers" for names, count in counts.items()]
        lines = [f"decode has {' and '.join(texts)}"] if texts else []
        lines += [f"not fused in {count} places: {why}" for why, count in self.refused.items()]
        is_empty = self.asked and not self.groups
        nothing = "nothing to fuse: no projections of one input" if is_empty else ""
        return "; ".join(lines) or nothing


def _is_replaced(module: torch.nn.Module) -> bool:
    forward = vars(module).get("forward")
    return forward is not None and not is_of_ranks(forward)


def _unpackable(tensors: list[torch.Tensor]) -> str:
    """Why these parameters cannot lie in one buffer."""
    first = tensors[0]
    if any(type(each) is not torch.nn.Parameter or each.is_inference() for each in tensors):
        return f"a weight is a {type(first).__name__} that must not move"
    if any(type(each.data) is not torch.Tensor for each in tensors):
        return f"a weight is a {type(first.data).__name__}"
    if first.is_meta or not first.is_floating_point():
        return f"weights of {first.dtype} on {first.device}"
    if len({(each.dtype, each.device) for each in tensors}) > 1:
        return "the weights have different dtypes or devices"
    return "" if all(each.is_contiguous() for each in tensors) else "a weight is not contiguous"


def _is_alone(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _is_laid(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    """Whether a tensor lies in its memory where `pack` would lay it in that of its group."""
    index = next(index for index, each in enumerate(tensors) if each is tensor)
    before = sum(each.numel() for each in tensors[:index])
    whole = sum(each.numel() for each in tensors) * tensor.element_size()
    nbytes = tensor.untyped_storage().nbytes()
    return bool(tensor.storage_offset() == before and nbytes == whole)


def _is_packed(tensors: list[torch.Tensor]) -> bool:
    """Whether tensors lie behind each other in one storage."""
    storages = {each.untyped_storage().data_ptr() for each in tensors}
    ends = [each.data_ptr() + each.numel() * each.element_size() for each in tensors]
    begins = [each.data_ptr() for each in tensors[1:]]
    return len(storages) == 1 and begins == ends[:-1]


def _lay(tensors: list[torch.Tensor]) -> None:
    rows = [len(each) for each in tensors]
    buffer = tensors[0].new_empty((sum(rows), *tensors[0].shape[1:]))
    for tensor, place in zip(tensors, buffer.split(rows), strict=True):
        place.copy_(tensor)
        tensor.data = place
