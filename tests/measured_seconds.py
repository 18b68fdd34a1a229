"""Which cases a run of everything leaves out, by the seconds that each took on two cores
(`tests/seconds.json`).

`pytest` and `.ci/run` must end within minutes, and a tenth of the cases takes nine tenths of the
time, most of it in compilers. So of each test the cases that took more than CASE seconds are left
out, but for its quickest, which stays where it took at most QUICKEST. What has not been measured
runs. `pytest --cases all` runs everything, as naming files does.

A release makes a whole run, and writes the file anew from it (CONTRIBUTING.md):

    pytest --cases all --junitxml=whole.xml
    python tests/measured_seconds.py whole.xml
"""

import json
import pathlib
import re
import sys
import xml.etree.ElementTree

FILE = pathlib.Path(__file__).parent / "seconds.json"
ENTRY = 0.3  # seconds; what takes less has no entry
CASE = 0.3
QUICKEST = 1.5


def function_of(name):
    """A test's own name, with that of its class and without the parameters of a case."""
    return name.partition("[")[0]


def slow_cases(seconds, names):
    """Of a file's cases `names`, a set to leave out; `seconds` is {name: seconds} of that file."""
    slow, seen = set(), set()
    for taken, name in sorted((seconds.get(name, 0.0), name) for name in names):
        if taken > (CASE if function_of(name) in seen else QUICKEST):
            slow.add(name)
        seen.add(function_of(name))
    return slow


def quick_and_slow(items, root):
    """What pytest collected below the folder `root`, in two lists: to run, and to leave out."""
    measured = json.loads(FILE.read_text())
    files = {}
    for item in items:
        path = item.path.relative_to(root).as_posix()
        files.setdefault(path, []).append(item.nodeid.partition("::")[2])
    slow = {
        (path, name)
        for path, names in files.items()
        for name in slow_cases(measured.get(path, {}), names)
    }
    lists = [], []
    for item in items:
        path, name = item.path.relative_to(root).as_posix(), item.nodeid.partition("::")[2]
        lists[(path, name) in slow].append(item)
    return lists


def measured_in(report):
    """{file: {case: seconds}} of a report in JUnit's form, skipped and failed cases aside."""
    files = {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        seconds = float(case.get("time"))
        if len(case) == 0 and seconds >= ENTRY:
            module, group = re.fullmatch(r"(.*?\.test_\w+)\.?(.*)", case.get("classname")).groups()
            name = f"{group}::{case.get('name')}" if group else case.get("name")
            files.setdefault(module.replace(".", "/") + ".py", {})[name] = round(seconds, 1)
    return {path: dict(sorted(files[path].items())) for path in sorted(files)}


if __name__ == "__main__":
    FILE.write_text(json.dumps(measured_in(sys.argv[1]), indent=0) + "\n")
