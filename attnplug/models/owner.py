"""Which model a layer's policy was applied to, so that what was copied or taken out of it is told
from what is still a part of it."""

import weakref
from typing import Any

import torch


class Owner:
    """The model that a policy was applied to, as long as it lives. A copy of the model has the copy
    for an owner; what is copied without its model, or read from a file, has none."""

    def __init__(self, model: torch.nn.Module | None = None):
        self.model = None if model is None else weakref.ref(model)

    def holds(self, module: torch.nn.Module) -> bool:
        """Whether the model lives and the module is a part of it."""
        model = None if self.model is None else self.model()
        return model is not None and any(each is module for each in model.modules())

    def __deepcopy__(self, memo: dict[int, Any]) -> "Owner":
        # copy.deepcopy notes every object before its content.
        return Owner(None if self.model is None else memo.get(id(self.model())))

    def __reduce__(self) -> tuple[Any, ...]:
        return Owner, ()
