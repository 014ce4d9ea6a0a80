"""Columns with sampling parameters in the step records of the target and of drafts."""

import numpy as np

from foredraft.record_layout import Layout

# Named as in `SamplingParams`.
FLOATS = ("temperature", "top_p", "min_p")
SAMPLING = Layout(
    *((name, np.float32) for name in FLOATS),
    ("top_k", np.int32),
    ("seed", np.uint64),
)
