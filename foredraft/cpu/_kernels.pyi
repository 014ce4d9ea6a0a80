KERNELS: tuple[str, ...]

def set_num_threads(number: int, /) -> None: ...
def get_num_threads() -> int: ...
def multiply(
    x: int,
    weight: int,
    bias: int,
    out: int,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    num_threads: int,
    kernel: int,
    /,
) -> None: ...
