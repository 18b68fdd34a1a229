"""`attnplug sglang`: SGLang's server started with a policy, without SGLang."""

import argparse
import os
import shlex
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import attnplug.serve.sglang as room
from attnplug.cli import app
from attnplug.errors import ArgumentError, PolicyError, ServeError
from attnplug.serve.sglang.command import COUNTS, SPELLINGS, SWITCHES, TEXTS, server_command

MODEL = "Qwen/Qwen2.5-7B-Instruct"
LAYERS = '{"policy": "momo", "layers": {"4-7": "momo+gather(block=128)"}}'


@pytest.fixture
def installed(monkeypatch):
    """An SGLang of a version that is served."""
    monkeypatch.setattr(room, "version", lambda: "0.5.23")
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    monkeypatch.delenv("ATTNPLUG_POLICY", raising=False)


def test_it_is_sglangs_server_with_our_options_and_then_the_users(installed, monkeypatch):
    started = []
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given))
    options = ["--context-length", "131072", "--kv-cache-dtype=auto", "--trust-remote-code"]
    asked = ["--policy", "momo+gather(k=8)", *options, "--tp", "2"]
    result = CliRunner().invoke(app, ["sglang", MODEL, *asked])
    assert result.exit_code == 0, result.output
    start = [sys.executable, "-m", "sglang.launch_server", "--model-path", MODEL]
    words = [*start, "--attention-backend", "attnplug", "--page-size", "64", *options, "--tp", "2"]
    environment = {**os.environ, "ATTNPLUG_POLICY": "momo+gather(k=8)"}
    assert started == [(sys.executable, words, environment)]
    assert shlex.split(result.stderr) == ["ATTNPLUG_POLICY=momo+gather(k=8)", *words]


def test_the_line_that_is_printed_starts_it_in_a_shell(installed, tmp_path):
    (tmp_path / "sglang").mkdir()
    shown = "import os, sys; print(os.environ['ATTNPLUG_POLICY'], *sys.argv[1:], sep='\\n')"
    (tmp_path / "sglang" / "launch_server.py").write_text(shown)
    command = server_command(MODEL, LAYERS, ["--served-model-name", "a b"])
    done = subprocess.run(
        str(command), shell=True, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [LAYERS, *command.words[3:]]


@pytest.mark.parametrize(
    ("policy", "options", "added"),
    [
        ("momo+gather", [], ["--page-size", "64"]),
        ("gather(block=128)", [], ["--page-size", "128"]),
        (LAYERS, [], ["--page-size", "128"]),
        ("momo+gather", ["--page-size", "32"], []),
        ("momo+gather", ["--page-s=32"], []),
        ("momo", [], []),
        ("momo", ["--page-size", "1"], []),
        ("dense", [], []),
    ],
)
def test_pages_are_whole_blocks_of_gather(installed, policy, options, added):
    words = server_command(MODEL, policy, options).words
    assert words[words.index("attnplug") + 1 :] == added + options


@pytest.mark.parametrize(
    ("option", "name", "instead"),
    [
        (["--attention-backend", "fa3"], "--attention-backend", "--policy"),
        (["--attention-back=fa3"], "--attention-backend", "--policy"),
        (["--model-path", "other"], "--model-path", "MODEL"),
        (["--model=other"], "--model-path", "MODEL"),
    ],
)
def test_options_that_the_policy_and_the_model_set_are_refused(installed, option, name, instead):
    with pytest.raises(ArgumentError, match=f"{name} is what {instead} sets; start `python -m sg"):
        server_command(MODEL, "momo", option)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--page-size 8", "decodes by blocks of 16 keys, and a page has 8; add --page-size 64"),
        ("--decode-attention-backend fa3", "use --attention-backend attnplug for both"),
        ("--prefill-attention-backend fa3", "use --attention-backend attnplug for both"),
        ("--speculative-algorithm EAGLE", "drop --speculative-algorithm"),
        ("--speculative-algo=EAGLE", "drop --speculative-algorithm"),
        ("--dllm-algorithm LowConfidence", "drop --dllm-algorithm"),
        ("--disaggregation-mode decode", "drop --disaggregation-mode"),
        ("--dp-size 2 --enable-dp-attention", "drop --attn-dp-size and --enable-dp-attention"),
        ("--attention-data-parallel-size 2", "drop --attn-dp-size"),
        ("--dcp-size 2", "use --tp-size"),
        ("--attention-context-parallel-size=2", "use --tp-size"),
        ("--enable-two-batch-overlap", "drop --enable-two-batch-overlap"),
        ("--enable-pdmux", "drop --enable-two-batch-overlap and --enable-pdmux"),
        ("--enable-torch-compile", "drop --enable-torch-compile"),
        ("--cuda-graph-backend-prefill full", "use --cuda-graph-backend-prefill breakable"),
        ('--cuda-graph-config {"prefill":{"backend":"full"}}', "prefill breakable"),
        ("--enable-hierarchical-cache", "drop --enable-hierarchical-cache"),
        ("--enable-hicache", "drop --enable-hierarchical-cache"),
        ("--enable-lmcache", "--enable-lmcache"),
        ("--enable-flexkv", "--enable-flexkv"),
        ("--radix-cache-backend other", "--radix-cache-backend"),
        ("--enable-unified-memory", "drop --enable-unified-memory"),
        ("--enable-kv-cache-sharding", "and --enable-kv-cache-sharding"),
        ("--enable-hisparse", "--enable-hisparse chooses keys itself"),
        ("--prefill-only-disable-kv-cache", "drop --prefill-only-disable-kv-cache"),
        ("--kv-cache-dtype fp8_e5m2", "keys are fp8_e5m2 .* use one of these, or use SGLang's own"),
        ("--kv-cache-dtype mxfp8", "in 16 bits or in fp8_e4m3"),
    ],
)
def test_options_that_cannot_be_served_are_refused_before_it_starts(installed, options, message):
    with pytest.raises(ServeError, match=f"attnplug in SGLang: .*{message}"):
        server_command(MODEL, "momo+gather", options.split())


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("momo", "--decode-attention-backend fa3"),
        ("momo+gather", "--kv-cache-dtype fp8_e4m3"),
        ("momo+gather", "--kv-cache-dtype bf16 --chunked-prefill-size 4096 --enable-mixed-chunk"),
        ("momo+gather", '--cuda-graph-config {"prefill":{"backend":"disabled"}}'),
        ("momo+gather", '--cuda-graph-backend-prefill breakable --cuda-graph-config {"decode":{}}'),
        ("momo+gather", "--config server.yaml --disaggregation-bootstrap-port 1 --a-new-option"),
    ],
)
def test_other_options_are_sglangs(installed, policy, options):
    assert server_command(MODEL, policy, options.split()).words[-len(options.split()) :] == (
        options.split()
    )


def test_a_graphs_json_is_asked_before_its_option_as_in_sglang(installed):
    asked = ["--cuda-graph-backend-prefill", "full", "--cuda-graph-config"]
    server_command(MODEL, "momo", [*asked, '{"prefill": {"backend": "breakable"}}'])
    with pytest.raises(ServeError, match="prefill breakable"):
        server_command(MODEL, "momo", [*asked, '{"decode": {"backend": "full"}}'])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--page-size", "many"], "sglang: argument --page-size: invalid int value: 'many'"),
        (["--page-size"], "sglang: argument --page-size: expected one argument"),
        (["--cuda-graph-config", "{"], "--cuda-graph-config is no JSON"),
    ],
)
def test_options_that_cannot_be_read_are_named(installed, options, message):
    with pytest.raises(ArgumentError, match=message):
        server_command(MODEL, "momo", options)


def test_policies_that_sglang_cannot_serve_are_refused_before_it_starts(installed):
    for policy, message in (
        ("certified", "certified is not served; use --kv-cache-dtype fp8_e4m3"),
        ("momo+gvr", "gvr is not served; use gather"),
        ("momo+stream", "stream is not served; use attnplug.trace.record"),
        ('{"policy": ', "which is no JSON"),
    ):
        with pytest.raises(ServeError, match=message):
            server_command(MODEL, policy, [])
    with pytest.raises(PolicyError, match="Did you mean gather"):
        server_command(MODEL, "gathr", [])
    exact = "gather(bounds='exact')"
    with pytest.raises(ServeError, match=r"fp8_e4m3: gather's .* drop bounds='exact'"):
        server_command(MODEL, exact, ["--kv-cache-dtype", "fp8_e4m3"])


def test_plugins_that_keep_attnplug_out_are_named(installed, monkeypatch):
    for allowed in ("", "other, attnplug"):
        monkeypatch.setenv("SGLANG_PLUGINS", allowed)
        server_command(MODEL, "momo", [])
    for allowed in ("other", ","):
        monkeypatch.setenv("SGLANG_PLUGINS", allowed)
        with pytest.raises(ServeError, match=f"SGLANG_PLUGINS is '{allowed}', .* add attnplug"):
            server_command(MODEL, "momo", [])


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "SGLang is not installed; pip install 'sglang<0.5.24,>=0.5.22'"),
        ("0.5.21", "SGLang 0.5.21 is not supported"),
    ],
)
def test_an_sglang_that_is_not_served_is_named(monkeypatch, found, message):
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    monkeypatch.setattr(room, "version", lambda: found)
    result = CliRunner().invoke(app, ["sglang", MODEL])
    assert result.exit_code == 1 and message in result.stderr


@pytest.fixture
def sglangs():
    """Flag -> what SGLang's own parser does with it."""
    pytest.importorskip("sglang.srt.plugins", reason="SGLang is not installed: sglang_cpu.sh")
    import sglang_real  # noqa: F401  # stands in for its kernels
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {flag: each for each in parser._actions for flag in each.option_strings}


@pytest.mark.sglang
@pytest.mark.filterwarnings("ignore")
def test_the_options_and_their_defaults_are_those_of_sglangs_parser(sglangs):
    for name, default in {**dict.fromkeys(SWITCHES, False), **TEXTS, **COUNTS}.items():
        action = sglangs[f"--{name.replace('_', '-')}"]
        assert (action.dest, action.default) == (name, default)
        assert (action.nargs == 0) == (name in SWITCHES)
        spelled = SPELLINGS.get(name)
        if spelled != "--enable-hicache" or spelled in sglangs:  # 0.5.22 does not have it
            assert action.option_strings[1:] == ([spelled] if spelled else [])


@pytest.mark.sglang
@pytest.mark.filterwarnings("ignore")
def test_no_other_option_of_sglangs_abbreviates_one_that_is_read(sglangs):
    read = {f"--{name.replace('_', '-')}" for name in (*SWITCHES, *TEXTS, *COUNTS)}
    read |= set(SPELLINGS.values())
    for flag in sglangs.keys() - read:
        assert not any(each.startswith(flag) for each in read), flag


@pytest.mark.sglang
@pytest.mark.filterwarnings("ignore")
def test_sglang_turns_the_old_option_of_data_parallel_attention_into_the_new(sglangs):
    """So the backend, which sees arguments that are resolved, must ask for the new."""
    from sglang.srt.arg_groups import overrides, parallel_hook
    from sglang.srt.server_args import ServerArgs

    server = ServerArgs(model_path="none", dp_size=2, tp_size=2, enable_dp_attention=True)
    parallel_hook.handle_deprecated_dp_attention(server)
    resolved = overrides.resolving_view(server)
    assert (resolved.enable_dp_attention, resolved.attn_dp_size) == (False, 2)
