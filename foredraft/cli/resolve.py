"""`python -m foredraft.cli.resolve MODEL` prints a model's local directory, converting or assembling it once."""

import contextlib
import sys

from foredraft.errors import ForedraftError
from foredraft.rpc.lifetime import exit_with_parent
from foredraft.telemetry import logging


def main() -> int:
    """Only the directory goes to standard output; everything else to standard error."""
    exit_with_parent()
    logging.setup("model")
    # Torch is imported here, not in the process that asked.
    from foredraft.models.registry import resolve_model_path

    try:
        with contextlib.redirect_stdout(sys.stderr):
            directory = resolve_model_path(sys.argv[1])
    except ForedraftError as error:
        print(error, file=sys.stderr)
        return 1
    print(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
