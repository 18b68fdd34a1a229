"""Every policy against every promise of the contract that one policy can be held to.

Policies that are approximations get, as `exact`, the setting whose budget covers everything.
"""

from typing import Any

import pytest
from contract_cases import CASES, shipped

from attnplug.testing import check_policy

GROUPS = {
    "exactness": (1, 3, 8),
    "rows": (2,),
    "compile": (4,),
    "generate": (5,),
    "housekeeping": (6, 7),
}


# Inductor compiles what lies between the ops, which is the model's, and takes a C++ compiler ten
# seconds a policy. These two have ops of their own in a prefill, in a step and in neither.
INDUCTOR = ("dense", "momo+gather")
# A prefill and a step are graphs of their own, so that what is compiled of two methods is what is
# compiled of each: one such row is enough.
QUICK = [name for name in CASES if "+" not in name or name in INDUCTOR]


def rows() -> list[Any]:
    """Every row with every group; a release compiles the rows that are not `QUICK`."""
    long = [pytest.mark.long]
    return [
        pytest.param(name, group, marks=long if group == "compile" and name not in QUICK else ())
        for name in CASES
        for group in GROUPS
    ]


@pytest.mark.parametrize(("name", "group"), rows())
def test_policy_keeps_its_promises(name, group, device):
    case = CASES[name]
    traced = device == "cpu" and group == "compile" and name not in INDUCTOR
    backend = "aot_eager" if traced else "inductor"
    asked = dict(exact=case.exact, promises=GROUPS[group], device=device, backend=backend)
    print(check_policy(case.policy, **asked))


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in CASES if name not in INDUCTOR])
def test_policy_compiles_with_inductor(name):
    case = CASES[name]
    print(check_policy(case.policy, exact=case.exact, promises=GROUPS["compile"]))


def test_every_method_has_a_row():
    missing = [name for name in shipped() if name not in CASES]
    assert not missing, (
        f"tests/contract/contract_cases.py: CASES needs a row for {', '.join(missing)}"
    )
