"""Programs that validate what operators use.

They come with the extra `ops` or from the system; without one, a test skips.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def find(name: str) -> str:
    """Returns the program's path, in this interpreter's environment or on PATH; skips the test
    when there is none.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which(name, path=path)
    if found is None:
        pytest.skip(
            f"{name} is not installed: pip install 'foredraft[ops]', apt-get install prometheus"
        )
    return found


def run(name: str, *arguments: str, **options: object) -> str:
    """Runs a program at the repository's root and returns what it printed; fails the test when it
    fails.
    """
    result = subprocess.run(
        [find(name), *arguments], cwd=ROOT, capture_output=True, text=True, check=False, **options
    )
    if result.returncode != 0:
        pytest.fail(f"{name} {' '.join(arguments)}:\n{result.stdout}{result.stderr}")
    return result.stdout
