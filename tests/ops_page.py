"""The ops reference: signature, what is written and the family's page of every registered op, from
the code. What an op does and its shapes stand on the page; tests/test_docs.py holds the shapes to
the docstrings.

    python tests/ops_page.py    # write the generated lines into docs/reference/ops.md
"""

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path

import torch

import attnplug.ops

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "reference" / "ops.md"
MARKED = re.compile(r"(<!-- op (\w+) -->\n).*?(<!-- /op -->)", re.DOTALL)
# The registered variants of an op: one leaves counting the token to compiled code, one has a table.
VARIANTS = {
    "dense_decode_paged": "dense_decode",
    "gather_attention_paged": "gather_attention",
    "gather_decode_paged": "gather_decode",
    "gather_decode_uncounted": "gather_decode",
    "select_blocks_paged": "select_blocks",
    "sketch_decode_uncounted": "sketch_decode",
    "sketch_host_decode_uncounted": "sketch_host_decode",
}


def ops() -> dict[str, Callable]:
    """The public functions of `attnplug.ops`, by name."""
    found = {name: getattr(attnplug.ops, name) for name in attnplug.ops.__all__}
    return {name: value for name, value in found.items() if inspect.isfunction(value)}


def schemas() -> dict[str, torch.FunctionSchema]:
    """The schema of every op that torch has under `attnplug::`, by name."""
    every = torch._C._jit_get_all_schemas()
    ours = [schema for schema in every if schema.name.startswith("attnplug::")]
    return {schema.name.partition("::")[2]: schema for schema in ours}


def family(op: Callable) -> str:
    """The folder of `attnplug/ops` that an op lies in."""
    return op.__module__.split(".")[2]


def described(name: str) -> str:
    """Signature, mutated tensors and page of one op."""
    op = ops()[name]
    bare = inspect.signature(op)
    bare = bare.replace(
        parameters=[p.replace(annotation=p.empty) for p in bare.parameters.values()],
        return_annotation=bare.empty,
    )
    written = [a.name for a in schemas()[name].arguments if a.alias_info and a.alias_info.is_write]
    page = next(p for p in (name, family(op)) if (DOCS / "methods" / f"{p}.md").exists())
    link = os.path.relpath(DOCS / "methods" / f"{page}.md", PAGE.parent)
    return "\n".join(
        [
            "",
            "```text",
            wrapped(f"{name}{bare}"),
            "```",
            "",
            f"Writes: {', '.join(f'`{argument}`' for argument in written) or 'nothing'}. "
            f"Family: `{family(op)}`, [{page}]({link}).",
            "",
            "",
        ]
    )


def wrapped(signature: str, width: int = 96) -> str:
    """The signature on as few lines as fit, broken behind commas."""
    head, _, rest = signature.partition("(")
    lines, indent = [head + "("], " " * (len(head) + 1)
    for argument in re.split(r"(?<=,) ", rest):
        if len(lines[-1]) + len(argument) + 1 > width:
            lines.append(indent)
        lines[-1] += ("" if lines[-1] in (head + "(", indent) else " ") + argument
    return "\n".join(lines)


def fill(page: str) -> str:
    """The page with the generated lines between its markers."""
    return MARKED.sub(lambda match: f"{match[1]}{described(match[2])}{match[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text()))
