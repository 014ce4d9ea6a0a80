"""`foredraft bench`: measures servers (`serve`), and finds the speculation that suits a model
(`speculative`).
"""

import difflib
import sys
from collections.abc import Sequence

HELP = """\
usage: foredraft bench COMMAND [flags]

commands:
  serve         load a running server (this one, or any with OpenAI's API): latencies, throughput, goodput
  speculative   try algorithms and trees on a model, print the best flags

  foredraft bench COMMAND --help     its flags and examples
"""  # noqa: E501


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    # Imported when used: a sweep starts services, a load does not.
    command, *rest = argv or ["--help"]
    if command in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if command == "serve":
        from foredraft.cli import bench_serve

        return bench_serve.main(rest)
    if command == "speculative":
        from foredraft.cli import bench_speculative

        return bench_speculative.main(rest)
    near = difflib.get_close_matches(command, ("serve", "speculative"), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    print(f"foredraft bench: there is no command {command!r}{hint}", file=sys.stderr)
    print("commands: serve, speculative; see foredraft bench --help", file=sys.stderr)
    return 2
