"""`foredraft train token-map`: ranks tokens by frequency for FR-Spec."""

import argparse
from pathlib import Path

from training.commands.parsing import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command."""
    parser = subparsers.add_parser("token-map", help="rank tokens by frequency for FR-Spec")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        required=True,
        help="model folder with a tokenizer.json, or this file",
    )
    parser.add_argument(
        "--data", type=Path, nargs="+", required=True, help="text, or generated output as .jsonl"
    )
    parser.add_argument("--size", type=int, required=True, help="tokens in the map")
    parser.add_argument(
        "--always", type=int, nargs="*", default=[0], help="ids that are always in the map"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="file to write, .pt; a .safetensors lies beside it"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from foredraft.errors import ConfigError
    from training.text_data import read_documents, read_tokenizer
    from training.token_map import check_out, count_tokens, select_tokens, write_token_map

    check_out(arguments.out)
    tokenizer = read_tokenizer(arguments.tokenizer)
    counts = count_tokens((document.text for document in read_documents(arguments.data)), tokenizer)
    if not counts.any():
        raise ConfigError("--data: there is no text")
    ids, coverage = select_tokens(counts, arguments.size, arguments.always)
    beside = write_token_map(ids, arguments.out)
    print(f"{len(ids)} of {len(counts)} tokens cover {coverage:.2%} of {int(counts.sum())} tokens")
    print(f"wrote {arguments.out} and {beside}")
    return 0
