"""The command `foredraft`: its help, its version, and what it says of mistakes before anything
starts.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from foredraft import __version__
from foredraft.cli import serve
from foredraft.cli.main import COMMANDS, main
from foredraft.config.flag_parser import ELSEWHERE


def test_help_teaches_every_command_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert main(["--help"]) == main(["help"]) == 0
    assert capsys.readouterr().out == text * 2
    for command in COMMANDS:
        assert f"\n  {command} " in text
    for part in ("foredraft serve", "foredraft generate", "curl", "python -m verify_service"):
        assert part in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"foredraft {__version__}\n"


def test_a_mistyped_command_is_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sevre"]) == 2
    assert "did you mean serve?" in capsys.readouterr().err


def test_the_help_of_serve_has_groups_examples_and_no_wiring(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["help", "serve"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for title in ("model:", "speculation:", "gateway:", "verifier:", "logging:", "examples:"):
        assert f"\n{title}" in text
    assert "--speculative-num-steps" in text
    for hidden in ("--listen", "--verifier", "--draft ", "  --metrics-port"):
        assert hidden not in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--speculative-algorithm", "STANDALONE"], "needs --speculative-draft-model-path"),
        (["--speculative-algorithm", "MAGIC"], "'MAGIC' is not one of NONE, NGRAM"),
        (["--port", "many"], "--port: 'many' is not an int"),
        (["--context-length=1"], "--context-length must be at least 2, not 1"),
        (["--max-total-tokens=1", "--page-size=1"], "--max-total-tokens must be at least 2, not 1"),
        (["--listen", "unix:/x"], "unrecognized arguments: --listen"),
        (
            ["--port=0", "--grpc-port=0", "--model-path=/nowhere"],
            "--model-path /nowhere: no such directory",
        ),
        (["--port=0", "--grpc-port=0", f"--model-path=/{'x' * 300}"], "x: File name too long"),
        (["--modelpath=x"], "--modelpath=x\n  did you mean --model-path?\n"),
        (["--pp-size", "2"], "\n  instead of --pp-size give --tensor-parallel-size\n"),
        (["--max-model-len=99"], "\n  instead of --max-model-len give --context-length\n"),
        (["--num-speculative-tokens=3"], "give --speculative-num-steps\n"),
        (["--max-prefill-tokens=9"], "give --chunked-prefill-size\n"),
        (["--disable-log-requests"], "--disable-log-requests: prompts are never logged; leave it"),
        (["--generation-config", "vllm"], "--generation-config: is not read; requests have OpenAI"),
        (["--quantization", "awq"], "int4; a quantized checkpoint says itself how it is: leave it"),
        (["--bogus", "-v", "3"], "unrecognized arguments: --bogus -v 3\nforedraft serve --help"),
    ],
)
def test_a_wrong_flag_ends_serve_before_it_starts(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["serve", *flags])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_what_stands_in_for_other_servers_flags_exists() -> None:
    flags = serve.make_parser()._option_string_actions
    instead = {hint.split()[0] for hint in ELSEWHERE.values() if hint.startswith("--")}
    assert instead <= set(flags)
    assert not set(ELSEWHERE) & set(flags)


def test_wiring_variables_do_not_reach_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_LISTEN", "unix:/elsewhere")
    monkeypatch.setenv("FOREDRAFT_PORT", "1234")
    assert serve.read_values(serve.make_parser().parse_args([])) == {"port": 1234}


def test_the_command_never_imports_torch_or_a_service() -> None:
    code = (
        "import sys, foredraft.cli.main, foredraft.cli.serve, foredraft.cli.stack\n"
        "bad = {'torch', 'gateway', 'verify_service', 'draft_service'} & set(sys.modules)\n"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
