"""`foredraft train corpus`: gathers permissively licensed text out of packages."""

import argparse
from pathlib import Path

from training.commands.parsing import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "corpus", help="gather permissively licensed text out of packages"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--packages", type=Path, help="folder with downloaded .deb files: build the documents"
    )
    parser.add_argument(
        "--wheels", type=Path, help="folder with the unpacked chitchat-dataset wheel"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from training.corpus.build import build_code, build_documents

    if arguments.packages:
        wheels = arguments.wheels or arguments.packages
        build_documents(arguments.packages, wheels, arguments.out, arguments.seed)
    else:
        build_code(arguments.out)
    return 0
