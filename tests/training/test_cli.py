"""`foredraft train` as a command: what it teaches, and which names of targets it knows."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from foredraft.cli.main import main

SMALL = ["--prompt=8", "--window=24", "--generate-batch=4", "--batch=2", "--steps=2", "--warmup=1"]
TEXT = "def add(left, right):\n    return left + right\n\n\n"


def test_without_a_command_it_says_what_can_be_trained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 0
    text = capsys.readouterr().out
    for part in ("corpus", "lm", "draft", "baselines", "token-map", "DSPARK", "PEAGLE"):
        assert part in text
    assert "docs/training.md" in text


def test_a_bundled_target_is_found_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "text.py").write_text(TEXT * 40)
    out = tmp_path / "head"
    flags = ["--target=foredraft-demo", f"--data={tmp_path / 'text.py'}", f"--out={out}"]
    sizes = ["--algorithm=EAGLE", "--windows=2", "--text-windows=2", "--device=cpu"]
    assert main(["train", "draft", *flags, *sizes, *SMALL]) == 0
    assert json.loads((out / "config.json").read_text())["target_model"] == "foredraft-demo"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--target=foredraft-demos"], "foredraft-demos: no such directory or file; known names:"),
        (["--target=foredraft-demo-eagle3"], "is no model that transformers runs: Llama"),
        (["--data"], "--data: there is no text"),
        (["--data={text}", "--window=500", "--text-windows=1"], "27 tokens of text are too few"),
        (["--data={text}", "--prompt=60", "--window=99"], "27 tokens of text are too few"),
        (["--validation={none}"], "no such file or folder"),
        (["--validation={text}"], "--validation: there is no text of more than --eval-prompt 256"),
        (["--validation={text}", "--eval-prompt=8", "--depth=160"], "--eval-new-tokens must be"),
        (
            ["--algorithm=DFLASH", "--block=23"],
            "--window must be more than --block + 1 = 24 tokens",
        ),
        (["--unroll-steps=23"], "--window must be more than --unroll-steps + 1 = 24 tokens"),
        (["--prompt=24"], "--window counts the prompt: it must be more than --prompt 24, not 24"),
        (["--window=2049"], "--window: 2049 tokens are more than the target's 2048"),
        (
            ["--validation={text}", "--eval-prompt=2000"],
            "--eval-prompt and --eval-new-tokens: 2160 tokens are more",
        ),
        (["--windows=0"], "give --windows, --text-windows or --free-windows"),
        (["--steps=0"], "--steps must be at least 1, not 0"),
        (["--batch=0"], "--batch must be at least 1, not 0"),
        (["--text-windows=-1"], "--text-windows must be at least 0, not -1"),
        (["--intermediate=-1"], "--intermediate must be at least 0, not -1"),
        (["--temperature=-1"], "--temperature must be at least 0, not -1"),
        (["--mask-token=8192"], "--mask-token must be in [0, 8191]"),
        (["--temperature=nan"], "--temperature must be at least 0, not nan"),
        (["--lr=nan"], "--lr must be a number above 0, not nan"),
        (["--max-minutes=-1"], "--max-minutes must be at least 0, not -1"),
        (["--seed=-1"], "--seed must be in [0, 4294967295], not -1"),
        (["--seed=99999999999999999999"], "--seed must be in [0, 4294967295], not 9999"),
        (
            ["--draft-vocab-size=4", "--validation={text}", "--eval-prompt=8"],
            "--topk must be at most the 4 tokens of the draft vocabulary, not 8",
        ),
    ],
)
def test_bad_input_leaves_no_folder(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, text = tmp_path / "head", tmp_path / "text.py"
    text.write_text(TEXT * 2)
    given = ["--target=foredraft-demo", f"--data={text}", f"--out={out}", "--windows=2", *SMALL]
    given += [flag.format(text=text, none=tmp_path / "none") for flag in flags]
    assert main(["train", "draft", *given, "--device=cpu"]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch=0"], "--batch must be at least 1, not 0"),
        (["--hidden=0"], "--hidden must be at least 1, not 0"),
        (["--heads=3", "--kv-heads=2"], "--heads must be a multiple of --kv-heads"),
        (["--batch=3", "--micro-batch=2"], "--batch must be a multiple of --micro-batch"),
        (["--validation={none}"], "no such file or folder"),
        (["--head-dim=15"], "--head-dim must be even, not 15"),
        (["--vocab-size=256"], "--vocab-size must be at least 257, not 256"),
        (["--max-minutes=nan"], "--max-minutes must be at least 0, not nan"),
        (["--lr=0"], "--lr must be a number above 0, not 0"),
        (["--seed=-1"], "--seed must be in [0, 4294967295], not -1"),
    ],
)
def test_a_language_model_needs_sizes_that_go_together(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, text = tmp_path / "model", tmp_path / "text.py"
    text.write_text(TEXT)
    given = [flag.format(none=tmp_path / "none") for flag in flags]
    assert main(["train", "lm", f"--data={text}", f"--out={out}", "--device=cpu", *given]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("given", ["py", "py=x", "py=-1"])
def test_repeats_of_a_domain_are_a_number(
    given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["train", "lm", f"--data={tmp_path}", f"--out={tmp_path}", f"--repeat={given}"])
    assert exit.value.code == 2
    assert f"argument --repeat: '{given}' is not DOMAIN=N" in capsys.readouterr().err


def test_text_with_a_token_that_the_target_does_not_have_is_told(
    toy_target: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(toy_target[1], tmp_path / "target")
    file = tmp_path / "target" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(["<|image|>"])
    tokenizer.save(str(file))
    text = tmp_path / "text.py"
    text.write_text(TEXT * 40)
    flags = [f"--target={tmp_path / 'target'}", f"--out={tmp_path / 'head'}", "--device=cpu"]
    sizes = ["--algorithm=MTP", "--windows=2", "--text-windows=2"]
    assert main(["train", "draft", *flags, f"--data={text}", *sizes, *SMALL]) == 0
    text.write_text(TEXT * 40 + "<|image|>")
    assert main(["train", "draft", *flags, f"--data={text}", *sizes, *SMALL]) == 2
    last = tokenizer.get_vocab_size() - 2
    message = f"the text has token {last + 1}, and the target's vocabulary ids 0 to {last}"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--order=8"], "--order must be in [0, 7], not 8"),
        (["--order=-1"], "--order must be in [0, 7], not -1"),
        (["--max-bytes=6"], "--data: 6 bytes of text are too few for --order 6"),
        (["--data={empty}"], "--data: 0 bytes of text are too few for --order 6"),
        (["--validation={empty}"], "--validation: there is no text"),
        (["--eval-bytes=0"], "--eval-bytes must be at least 1, not 0"),
    ],
)
def test_baselines_need_text_and_an_order(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, empty = tmp_path / "text.py", tmp_path / "empty.py"
    text.write_text(TEXT)
    empty.touch()
    given = [flag.format(empty=empty) for flag in flags]
    assert main(["train", "baselines", f"--data={text}", f"--validation={text}", *given]) == 2
    assert message in capsys.readouterr().err


def test_a_file_in_the_place_of_the_folder_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.py"
    text.write_text(TEXT * 40)
    flags = ["--target=foredraft-demo", f"--data={text}", f"--out={text}", "--windows=1"]
    assert main(["train", "draft", *flags, *SMALL, "--device=cpu"]) == 1
    assert f"foredraft train: [Errno 17] File exists: '{text}'" in capsys.readouterr().err


def test_an_interrupt_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("training.commands.draft.resolve_device", interrupted)
    command = ["train", "draft", "--target=x", f"--out={tmp_path}"]
    assert main(command) == 130
    assert "stopped; there is no checkpoint (--checkpoint-every)" in capsys.readouterr().err
    (tmp_path / "checkpoint.pt").touch()
    assert main(command) == 130
    assert "stopped; the same command with --resume goes on" in capsys.readouterr().err


def test_threads_sleep_while_they_wait_unless_the_environment_says_otherwise() -> None:
    program = "import os, training; print(os.environ['OMP_WAIT_POLICY'])"
    without = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    for environment, policy in (
        (without, "PASSIVE"),
        (without | {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
    ):
        ran = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert ran.stdout.strip() == policy
