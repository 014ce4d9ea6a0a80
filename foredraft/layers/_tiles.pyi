KERNELS: tuple[str, ...]
TILE: int

def multiply(
    x: int,
    out: int,
    bias: int,
    numbers: int,
    scales: int,
    zeros: int,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    group_size: int,
    bits: int,
    scale_type: int,
    num_threads: int,
    kernel: int,
    /,
) -> None: ...
