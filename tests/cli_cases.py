"""The attnplug command as tests of several files run it."""

import json

from typer.testing import CliRunner

from attnplug.cli import app

runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})


def run(*arguments: str):
    return runner.invoke(app, arguments)


def json_of(*arguments: str) -> dict:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
