"""Keeps torch on one thread, so that the tests cost the same wherever they run."""

import torch

torch.set_num_threads(1)
