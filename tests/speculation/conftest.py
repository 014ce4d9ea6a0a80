"""Keeps torch on one thread, so that the tests cost the same wherever they run."""

import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))  # for `speculation_reference`
