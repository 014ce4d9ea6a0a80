KERNELS: tuple[str, ...]
TILE: int

Factors = tuple[int, int, int]  # values, units, type

def multiply(
    x: int,
    out: int,
    bias: int,
    numbers: int,
    zeros: int,
    scales: Factors,
    offsets: Factors,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    group_size: int,
    unit_size: int,
    bits: int,
    zero: int,
    num_threads: int,
    kernel: int,
    /,
) -> None: ...
