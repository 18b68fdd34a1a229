"""Small models in other forms, for measuring what the models as they are cannot show. They are made
when they are loaded, from the same checkpoint; nothing is trained, and no copy is kept.

`gemma3-270m@64k` and `@128k` read two and four times as many tokens as Gemma 3 270M, whose global
layers then turn keys and queries by half or a quarter of the angle (linear rope scaling).
`smollm2-135m@d128` computes what SmolLM2-135M does, with heads of 128 numbers for 64: zeros fill
the rest. Rope pairs number i with number i + D/2 and turns them by theta^(-2i/D), so that the
halves of a head are padded apart and theta is squared; scores are divided by sqrt(D), so that
queries are multiplied by sqrt(2)."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Config = Any  # of transformers
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """A model in another form: of which one, how its config changes, and how its weights do."""

    base: str
    configure: Callable[[Config], None]
    convert: Callable[[Config, Weights], Weights] | None = None

    def load(self, source: Path, dtype: torch.dtype) -> Any:
        """The model, from the folder of its base's checkpoint."""
        from transformers import AutoModelForCausalLM

        config = self.config(source)
        if self.convert is None:
            return AutoModelForCausalLM.from_pretrained(source, config=config, dtype=dtype)
        plain: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        model = type(plain)(config).to(dtype)
        model.load_state_dict(self.convert(plain.config, plain.state_dict()))
        model.generation_config = plain.generation_config
        return model

    def config(self, source: Path) -> Config:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(source, local_files_only=True)
        self.configure(config)
        return config


def _stretch(factor: int) -> Callable[[Config], None]:
    def configure(config: Config) -> None:
        config.max_position_embeddings *= factor
        rope = config.rope_parameters["full_attention"]
        rope.update(rope_type="linear", factor=float(factor))

    return configure


def _widen(config: Config) -> None:
    config.head_dim *= 2
    config.rope_parameters["rope_theta"] **= 2


def _pad_heads(config: Config, weights: Weights) -> Weights:
    """The weights of a model whose heads have twice the numbers: each half of a head is followed by
    as many zeros."""
    half = config.head_dim // 2

    def pad(weight: torch.Tensor) -> torch.Tensor:
        """`[heads D,N]` to `[heads 2D,N]`."""
        halves = weight.unflatten(0, (-1, half))
        return torch.cat([halves, torch.zeros_like(halves)], 1).flatten(0, 1)

    def padded(name: str, weight: torch.Tensor) -> torch.Tensor:
        if name.endswith("q_proj.weight"):
            return pad(weight * 2**0.5)
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            return pad(weight)
        return pad(weight.T).T if name.endswith("o_proj.weight") else weight

    return {name: padded(name, weight) for name, weight in weights.items()}


VARIANTS = {
    "gemma3-270m@64k": Variant("gemma3-270m", _stretch(2)),
    "gemma3-270m@128k": Variant("gemma3-270m", _stretch(4)),
    "smollm2-135m@d128": Variant("smollm2-135m", _widen, _pad_heads),
}
