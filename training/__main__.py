"""`python -m training`: the same commands as `foredraft train`."""

import sys

from training.cli import main

sys.exit(main(sys.argv[1:]))
