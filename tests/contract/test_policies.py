"""Every policy against every promise of the contract that one policy can be held to.

Policies that are approximations get, as `exact`, the setting whose budget covers everything.
"""

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


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", CASES)
def test_policy_keeps_its_promises(name, group, device):
    case = CASES[name]
    report = check_policy(case.policy, exact=case.exact, promises=GROUPS[group], device=device)
    print(report)


def test_every_method_has_a_row():
    missing = [name for name in shipped() if name not in CASES]
    assert not missing, (
        f"tests/contract/contract_cases.py: CASES needs a row for {', '.join(missing)}"
    )
