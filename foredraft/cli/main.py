"""`foredraft`: dispatches to its commands and teaches them."""

import difflib
import importlib
import sys
from collections.abc import Callable, Sequence

from foredraft import __version__

HELP = """\
Foredraft serves large language models faster: a cheap draft guesses tokens ahead, the model
checks them all in one pass, and the text is the same as without the draft.

usage: foredraft COMMAND [flags]

commands:
  serve      serve a model on this machine over HTTP (OpenAI's API) and gRPC
  generate   print one answer, with the drafted tokens in another colour
  bench      load a server, or find the best speculation for a model
  train      train a head for a model of yours, or the models that come with Foredraft

  foredraft COMMAND --help     its flags and examples
  foredraft --version

try it:
  foredraft generate "Once upon a time"
  foredraft serve                                    # the demo model on port 30000
  curl http://127.0.0.1:30000/v1/models
  foredraft serve --model-path path/to/model --speculative-algorithm NGRAM

the parts by themselves, for several machines or containers:
  python -m draft_service  --help                    # proposes tokens
  python -m verify_service --help                    # owns the model, decides every token
  python -m gateway        --help                    # owns the text, talks to clients
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] == "help":
        arguments = [*arguments[1:2], "--help"]
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help"):
        print(HELP, end="")
        return 0
    if command == "--version":
        print(f"foredraft {__version__}")
        return 0
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"foredraft: there is no command {command!r}{hint}", file=sys.stderr)
        print(f"commands: {', '.join(COMMANDS)}; see foredraft --help", file=sys.stderr)
        return 2
    return COMMANDS[command](arguments[1:])


def _lazily(module: str) -> Callable[[Sequence[str]], int]:
    """Imports a command's module when it is used: `train` needs torch, `serve` must not have it."""

    def run(argv: Sequence[str]) -> int:
        return int(importlib.import_module(module).main(argv) or 0)

    return run


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "serve": _lazily("foredraft.cli.serve"),
    "generate": _lazily("foredraft.cli.generate"),
    "bench": _lazily("foredraft.cli.bench"),
    "train": _lazily("training.cli"),
}

if __name__ == "__main__":
    sys.exit(main())
