"""A pytest plugin, `-p told_failures`: each failure is written to $OUT/failures.log as it happens,
so that a run that is cut tells why tests failed."""

import os
from pathlib import Path

import pytest


class Told:
    def __init__(self, path: Path):
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self.path.open("a") as file:
                print(
                    f"== {report.nodeid} ({report.when})", report.longreprtext, sep="\n", file=file
                )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # xdist's workers report to the process that began them
        config.pluginmanager.register(Told(Path(os.environ.get("OUT", "/tmp")) / "failures.log"))
