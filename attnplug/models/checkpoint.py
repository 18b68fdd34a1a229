"""What transformers does not look at in a checkpoint. Each check raises ValueError."""

from pathlib import Path
from typing import Any

from attnplug import files


def check_generation_config(folder: Path) -> None:
    """Raise ValueError where a checkpoint's is damaged: transformers does without it then, and the
    model has no tokens that end an answer."""
    path = folder / "generation_config.json"
    if path.exists() and not isinstance(files.json_of(files.read_bytes(path)), dict):
        raise ValueError(f"{path.name} is no JSON object")


def check_vocabulary(model: Any, tokenizer: Any) -> None:
    """Raise ValueError where a tokenizer has more tokens than its model knows, as that of another
    model has: the first of them is an IndexError on a CPU, and ends the process's use of a GPU.
    Tokens that were added to a tokenizer do not count, as Gemma 3 adds that of an image for its
    text models, too."""
    known = getattr(model.config.get_text_config(decoder=True), "vocab_size", None)
    if isinstance(known, int) and tokenizer.vocab_size > known:
        raise ValueError(
            f"its tokenizer has {tokenizer.vocab_size:,} tokens and the model knows {known:,}, so "
            "they are not of one model"
        )
