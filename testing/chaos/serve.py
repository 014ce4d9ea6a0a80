"""`foredraft serve` as the chaos suite runs it: the verifier reaches its draft through the suite's
link.

Also it never gives up: here it is the suite that kills, far more often than `foredraft serve` bears
before it ends.
"""

import os
import sys
from typing import Any

from foredraft.cli import serve, stack
from foredraft.cli.supervisor import Service
from foredraft.rpc.lifetime import exit_with_parent

LINK_VARIABLE = "FOREDRAFT_CHAOS_LINK"
MAX_BACKOFF_SECONDS = 0.5


def _service(*, name: str, command: tuple[str, ...], **settings: Any) -> Service:
    if name == "verify":
        link = f"--draft=unix:{os.environ[LINK_VARIABLE]}"
        command = tuple(link if flag.startswith("--draft=") else flag for flag in command)
    settings |= {"max_deaths": None, "max_backoff_seconds": MAX_BACKOFF_SECONDS}
    return Service(name=name, command=command, **settings)


def main() -> int:
    """Takes the flags of `foredraft serve` and returns its exit status."""
    exit_with_parent()
    vars(stack)["Service"] = _service
    return serve.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
