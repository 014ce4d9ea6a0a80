"""Numbers of repetitions of tests: small for every run, and larger for `make test-thorough`."""

import os
from typing import TypeVar

Value = TypeVar("Value")
THOROUGH = "FOREDRAFT_TEST_THOROUGH"  # set in the environment of a thorough run


def rounds(usual: Value, thorough: Value) -> Value:
    """Returns `usual`, or `thorough` in a thorough run: a number of repetitions, or the values of a
    parameter.
    """
    return thorough if os.environ.get(THOROUGH) else usual
