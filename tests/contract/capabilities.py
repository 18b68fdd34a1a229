"""The docs' table of what works, from the contract's own lists: which families and policies it
runs, and which layers a policy must serve there. A cell is a claim that test_families.py holds.

    python tests/contract/capabilities.py    # write it into docs/reference/models.md
"""

from pathlib import Path

from contract_cases import METHODS
from families import FAMILIES, Family

import attnplug

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md"
BEGIN, END = "<!-- capabilities -->\n", "<!-- /capabilities -->"
WAYS = "greedy, beams, prompt lookup, chunked prefill, static and dynamic caches, left padding"


def served(family: Family, policy: str) -> str:
    """How many of the tiny model's layers the policy serves, and what the others are."""
    with attnplug.applied(family.build(), policy) as model:
        layers = attnplug.report(model).layers
    stays = {layer.kind for layer in layers if layer.prefill.endswith("(dense)")}
    if not stays:
        return "all layers"
    return f"all but {' and '.join(sorted(stays))} layers" if family.served else "none (reported)"


def table() -> str:
    """The table in Markdown, one row a family."""
    lines = [
        "",
        f"Tested with {WAYS}, and",
        "`torch.compile(fullgraph=True)`; `report` names what stays dense.",
        "",
        f"| family | {' | '.join(f'`{policy}` serves' for policy in METHODS)} |",
        f"| --- {'| --- ' * len(METHODS)}|",
    ]
    for family in FAMILIES:
        cells = " | ".join(served(family, policy) for policy in METHODS)
        lines.append(f"| {family.name} | {cells} |")
    return "\n".join([*lines, "", ""])


def fill(page: str) -> str:
    """The page with the table between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text()))
