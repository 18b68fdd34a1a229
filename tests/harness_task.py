"""A tiny task of lm-evaluation-harness that needs no network, and a model in a folder for it."""

import json
from pathlib import Path

from test_docs import byte_tokenizer

from attnplug.testing import tiny_model

TASK = "attnplug_tiny"


def write_checkpoint(folder: Path) -> Path:
    """A model with a tokenizer."""
    tiny_model(vocab_size=300, max_position_embeddings=2048).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "<pad>"
    tokenizer.save_pretrained(folder)
    return folder


def write_task(folder: Path, **changes) -> Path:
    """The file of a task of four questions with two choices each."""
    rows = [{"q": "a b c " * 20 + str(i), "choices": ["yes", "no"], "a": i % 2} for i in range(4)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{a}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "tiny.yaml").write_text(json.dumps(task | changes))  # JSON is YAML
    return folder / "tiny.yaml"
