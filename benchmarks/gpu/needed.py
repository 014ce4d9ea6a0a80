"""Ends a benchmark with a line where it has no NVIDIA GPU to run on."""

import torch


def need_gpu(device: str = "cuda") -> None:
    """Ends the program if `device` is `cuda` and this process sees none.

    Counts devices without touching one: programs that go on may still fork.
    """
    if device == "cuda" and not torch.cuda.device_count():
        raise SystemExit(
            "this benchmark needs an NVIDIA GPU, and this process sees none: `nvidia-smi` lists"
            " them, CUDA_VISIBLE_DEVICES may hide some"
        )
