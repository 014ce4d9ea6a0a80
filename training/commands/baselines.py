"""`foredraft train baselines`: bits per byte of xz and a byte n-gram model."""

import argparse
import json
from pathlib import Path

from training.commands.parsing import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "baselines", help="bits per byte of xz and a byte n-gram model on held-out text"
    )
    parser.add_argument(
        "--data", type=Path, nargs="+", required=True, help="training text of the n-gram model"
    )
    parser.add_argument("--validation", type=Path, nargs="+", required=True)
    parser.add_argument("--max-bytes", type=int, default=100_000_000, help="training text to use")
    parser.add_argument(
        "--eval-bytes", type=int, default=1_500_000, help="as in `train lm`: 1.5 MB a domain"
    )
    parser.add_argument("--order", type=int, default=6)
    parser.add_argument("--out", type=Path, help="write the numbers to this JSON file")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    import random

    from foredraft.errors import ConfigError
    from training.baselines import MAX_ORDER, ByteNgram, xz_bits_per_byte
    from training.bounds import check_least
    from training.lm.evaluate import heldout_texts
    from training.text_data import read_documents

    order = arguments.order
    if not 0 <= order <= MAX_ORDER:
        raise ConfigError(f"--order must be in [0, {MAX_ORDER}], not {order}")
    check_least(arguments, {"max_bytes": 1, "eval_bytes": 1}, {})
    documents = list(read_documents(arguments.data))
    random.Random(1).shuffle(documents)
    text = "\n".join(document.text for document in documents).encode()[: arguments.max_bytes]
    if len(text) <= order:
        raise ConfigError(f"--data: {len(text)} bytes of text are too few for --order {order}")
    held_out = list(read_documents(arguments.validation))
    if not held_out:
        raise ConfigError("--validation: there is no text")
    ngram = ByteNgram(text, order)
    rows = {}
    heldout = heldout_texts(held_out, arguments.eval_bytes)
    for domain, texts in heldout.items():
        held = "\n".join(texts).encode()
        rows[domain] = {
            "bytes": len(held),
            "xz": xz_bits_per_byte(held),
            f"ngram{order}": ngram.bits_per_byte(held),
        }
    print(json.dumps(rows, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0
