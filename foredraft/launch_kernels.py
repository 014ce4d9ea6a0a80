"""The device's side of `kernel_launch.overlapped`."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def await_kernel_before(DEPENDENT: tl.constexpr):
    """Waits for the kernel before, and lets the next one start: after that, or at once where
    DEPENDENT is 2.
    """
    if DEPENDENT == 2:
        tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    if DEPENDENT != 2:
        tl.extra.cuda.gdc_launch_dependents()
