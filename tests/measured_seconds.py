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
import sys
import xml.etree.ElementTree

FILE = pathlib.Path(__file__).parent / "seconds.json"
ENTRY = 0.3  # seconds; what takes less has no entry
CASE = 0.3
QUICKEST = 1.5


def function_of(name):
    """A test's own name, without the parameters of a case."""
    return name.partition("[")[0]


def slow_cases(seconds, names):
    """Of a file's cases `names` those to leave out; `seconds` is {name: seconds} of that file."""
    quickest = {}
    for name in names:
        taken = seconds.get(name, 0.0), name
        quickest[function_of(name)] = min(taken, quickest.get(function_of(name), taken))
    return {
        name
        for name in names
        if seconds.get(name, 0.0) > (QUICKEST if quickest[function_of(name)][1] == name else CASE)
    }


def quick_and_slow(items, root):
    """What pytest collected below the folder `root`, in two lists: to run, and to leave out."""
    measured = json.loads(FILE.read_text())
    names = {}
    for item in items:
        names.setdefault(item.path.relative_to(root).as_posix(), []).append(item.name)
    slow = {path: slow_cases(measured.get(path, {}), names[path]) for path in names}
    lists = [], []
    for item in items:
        lists[item.name in slow[item.path.relative_to(root).as_posix()]].append(item)
    return lists


def measured_in(report):
    """{file: {case: seconds}} of a report in JUnit's form, skipped and failed cases aside."""
    files = {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        seconds = float(case.get("time"))
        if len(case) == 0 and seconds >= ENTRY:
            path = case.get("classname").replace(".", "/") + ".py"
            files.setdefault(path, {})[case.get("name")] = round(seconds, 1)
    return {path: dict(sorted(files[path].items())) for path in sorted(files)}


if __name__ == "__main__":
    FILE.write_text(json.dumps(measured_in(sys.argv[1]), indent=0) + "\n")
