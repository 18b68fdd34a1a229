"""Which cases a run of everything leaves out."""

import json
from pathlib import Path

from measured_seconds import FILE, function_of, measured_in, slow_cases

ROOT = Path(__file__).parents[1]


def test_the_quickest_case_stays_unless_it_is_slow_itself():
    seconds = {
        "test_a[1]": 9.0,
        "test_a[2]": 1.4,
        "test_a[3]": 1.4,
        "test_b": 1.6,
        "test_c[1]": 0.4,
    }
    names = [*seconds, "test_c[2]", "test_new"]  # of which the last two were not measured
    assert slow_cases(seconds, names) == {"test_a[1]", "test_a[3]", "test_b", "test_c[1]"}


def test_a_report_gives_what_passed_and_took_time(tmp_path):
    report = tmp_path / "whole.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.ops.test_x" name="test_y[&lt;1&gt;]" time="2.345"/>'
        '<testcase classname="tests.ops.test_x" name="test_quick" time="0.01"/>'
        '<testcase classname="tests.test_u.TestV" name="test_w" time="1"/>'
        '<testcase classname="tests.ops.test_x" name="test_z" time="5"><failure/></testcase>'
        "</testsuite></testsuites>"
    )
    assert measured_in(report) == {
        "tests/ops/test_x.py": {"test_y[<1>]": 2.3},
        "tests/test_u.py": {"TestV::test_w": 1.0},
    }


def test_what_was_measured_is_there():
    for path, cases in json.loads(FILE.read_text()).items():
        text = (ROOT / path).read_text()
        tests = {function_of(name).rpartition("::")[2] for name in cases}
        gone = {name for name in tests if f"def {name}(" not in text}
        assert not gone, f"{path}: measure anew, as measured_seconds.py says: {gone}"
