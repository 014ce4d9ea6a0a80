"""The commands below `foredraft train`: corpus, lm, draft, baselines, token-map."""

import argparse
import sys

from foredraft.errors import ForedraftError
from training.commands import baselines, corpus, draft, lm, token_map
from training.commands.parsing import Subparsers


def add_parsers(subparsers: Subparsers) -> None:
    """Adds the training commands; each sets `run`, a function of the parsed arguments that returns
    an exit status.
    """
    for command in (corpus, lm, draft, baselines, token_map):
        command.add_parser(subparsers)


def main(argv: list[str]) -> int:
    """Runs one training command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="foredraft train",
        description=(
            "Trains a head or a block drafter for a target of yours (draft: EAGLE3, EAGLE, MTP,"
            " DFLASH, DSPARK, PEAGLE), or the models that come with Foredraft."
        ),
        epilog="docs/training.md goes from text to a measured head; COMMAND --help has the flags.",
    )
    add_parsers(parser.add_subparsers(title="commands", metavar="COMMAND", required=True))
    if not argv:
        parser.print_help()
        return 0
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except ForedraftError as error:
        print(f"foredraft train: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"foredraft train: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"foredraft train: stopped{_how_to_go_on(arguments)}", file=sys.stderr)
        return 130


def _how_to_go_on(arguments: argparse.Namespace) -> str:
    if "resume" not in arguments:
        return ""
    if (arguments.out / "checkpoint.pt").is_file():
        return "; the same command with --resume goes on"
    return "; there is no checkpoint (--checkpoint-every): the steps so far are lost"
