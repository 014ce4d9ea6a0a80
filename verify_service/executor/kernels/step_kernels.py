"""The first and the last kernel of a decode step of fixed shape, in Triton: see `steps`."""

# mypy: ignore-errors
import triton
import triton.language as tl

from foredraft.trees import draft_tree

_NO_PARENT = tl.constexpr(draft_tree.NO_PARENT)


@triton.jit
def begin(
    records_ptr, state_ptr, trees_ptr, tokens_ptr, parents_ptr, committed_ptr, tables_ptr,
    record_stride, rows, num_nodes, table_stride,
    SLOT: tl.constexpr, COMMITTED: tl.constexpr, TREE: tl.constexpr, ENTRY: tl.constexpr, NEW_PAGE: tl.constexpr,
    FIRST_TOKEN: tl.constexpr, FIRST_PARENT: tl.constexpr, ROWS: tl.constexpr, BRANCHED: tl.constexpr,
):  # fmt: skip
    """Reads root, tree and committed keys of one sequence, from its record or from the device's
    state.
    """
    sequence = tl.program_id(0)
    offsets = tl.arange(0, ROWS)
    inside = offsets < rows
    record = records_ptr + sequence * record_stride
    slot = tl.load(record + SLOT)
    new_page = tl.load(record + NEW_PAGE)
    if new_page > 0:
        tl.store(tables_ptr + slot * table_stride + tl.load(record + ENTRY), new_page - 1)
    committed = tl.load(record + COMMITTED)
    root = tl.load(record + FIRST_TOKEN)
    if committed < 0:
        committed = tl.load(state_ptr + slot * 2)
        root = tl.load(state_ptr + slot * 2 + 1)
    below = inside & (offsets > 0)
    tree = tl.load(record + TREE)
    if tree < 0:
        tokens = tl.load(record + FIRST_TOKEN + offsets, mask=below, other=0)
        parents = tl.load(record + FIRST_PARENT + offsets, mask=below, other=_NO_PARENT)
    else:
        node = offsets - 1
        known = below & (node < num_nodes)
        nodes = trees_ptr + tree * 2 * num_nodes + node
        tokens = tl.load(nodes, mask=known, other=0)
        parents = tl.load(nodes + num_nodes, mask=known, other=_NO_PARENT)
        parents = tl.where(parents >= -1, parents + 1, _NO_PARENT)
    if not BRANCHED:
        parents = tl.where(parents == offsets - 1, parents, _NO_PARENT)
    out = sequence * rows + offsets
    tl.store(tokens_ptr + out, tl.where(offsets == 0, root, tokens), mask=inside)
    tl.store(parents_ptr + out, tl.where(offsets == 0, -1, parents), mask=inside)
    tl.store(committed_ptr + sequence, committed)


@triton.jit
def spread(
    records_ptr, positions_ptr, floats, top_ks, seeds, next_positions,
    record_stride, float_stride, rows, num_rows,
    FIRST_FLOAT: tl.constexpr, NUM_FLOATS: tl.constexpr, TOP_K: tl.constexpr, SEED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies the sampling columns of the records to each row of their sequences."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    record = records_ptr + (row // rows) * record_stride
    for column in tl.static_range(NUM_FLOATS):
        value = tl.load(record + FIRST_FLOAT + column, mask=inside, other=0)
        out = floats + column * float_stride + row
        tl.store(out, value.to(tl.float32, bitcast=True), mask=inside)
    top_k = tl.load(record + TOP_K, mask=inside, other=0)
    tl.store(top_ks + row, top_k.to(tl.int64), mask=inside)
    low = tl.load(record + SEED, mask=inside, other=0).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(record + SEED + 1, mask=inside, other=0).to(tl.int64)
    tl.store(seeds + row, (high << 32) | low, mask=inside)
    position = tl.load(positions_ptr + row, mask=inside, other=0)
    tl.store(next_positions + row, position + 1, mask=inside)


@triton.jit
def pretend(
    records_ptr, path_ptr, length_ptr, emitted_ptr,
    record_stride, rows, stride, filler,
    FORCED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Replaces the outcome of one walk by a path of a given length, where a length is given."""
    sequence = tl.program_id(0)
    forced = tl.load(records_ptr + sequence * record_stride + FORCED)
    if forced > 0:
        offsets = tl.arange(0, ROWS)
        inside = offsets < rows
        length = tl.minimum(forced, rows // stride)
        on_path = offsets < length
        out = sequence * rows + offsets
        # The likeliest node comes first in every tree.
        places = tl.maximum(offsets * stride - (stride - 1), 0)
        tl.store(path_ptr + out, tl.where(on_path, places, -1), mask=inside)
        tl.store(emitted_ptr + out, tl.where(on_path, filler, -1).to(tl.int64), mask=inside)
        tl.store(length_ptr + sequence, length)


@triton.jit
def end(
    records_ptr, state_ptr, committed_ptr, path_ptr, length_ptr, emitted_ptr,
    tokens_ptr, parents_ptr, results_ptr, accepted_ptr, index_ptr,
    record_stride, result_stride, rows, max_rows, max_path,
    SLOT: tl.constexpr, ROWS: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    """Writes the outcome of one sequence: for the host, for the draft, and for the next step."""
    sequence = tl.program_id(0)
    offsets = tl.arange(0, ROWS)
    inside = offsets < rows
    slot = tl.load(records_ptr + sequence * record_stride + SLOT)
    length = tl.load(length_ptr + sequence)
    source = sequence * rows + offsets
    path = tl.load(path_ptr + source, mask=inside, other=-1)
    emitted = tl.load(emitted_ptr + source, mask=inside, other=-1).to(tl.int32)
    result = results_ptr + sequence * result_stride
    tl.store(result, length)
    tl.store(result + 1 + offsets, path, mask=inside)
    tl.store(result + 1 + max_rows + offsets, emitted, mask=inside)
    tokens = tl.load(tokens_ptr + source, mask=inside, other=0)
    tl.store(result + 1 + 2 * max_rows + offsets, tokens, mask=inside)
    parents = tl.load(parents_ptr + source, mask=inside, other=_NO_PARENT)
    tl.store(result + 1 + 3 * max_rows + offsets, parents, mask=inside)
    newest = tl.maximum(tl.sum(tl.where(offsets == length - 1, emitted, 0), 0), 0)
    tl.store(state_ptr + slot * 2, tl.load(committed_ptr + sequence) + length)
    tl.store(state_ptr + slot * 2 + 1, newest)
    steps = tl.arange(0, PATH)
    on_path = steps < max_path
    known = on_path & (steps < rows)
    row = tl.load(path_ptr + sequence * rows + steps, mask=known, other=0)
    row = sequence * rows + tl.maximum(row, 0)
    tl.store(index_ptr + sequence * max_path + steps, row.to(tl.int64), mask=on_path)
    told = tl.load(emitted_ptr + sequence * rows + steps, mask=known, other=-1).to(tl.int32)
    told = tl.where(steps < length, tl.maximum(told, 0), told)  # no token: the sequence ends here
    accepted = accepted_ptr + sequence * (max_path + 1)
    tl.store(accepted, tl.minimum(length, max_path))
    tl.store(accepted + 1 + steps, told, mask=on_path)


@triton.jit
def hand_over(
    accepted_ptr, index_ptr, hidden_ptr, to_accepted_ptr, to_rows_ptr,
    hidden_stride, width, max_path,
    WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies part of one hidden state; the program of a sequence's first part also copies its
    committed tokens.
    """
    row = tl.program_id(0)
    block = tl.program_id(1)
    if block == 0 and row % max_path == 0:
        words = tl.arange(0, WORDS)
        inside = words <= max_path
        first = row // max_path * (max_path + 1)
        told = tl.load(accepted_ptr + first + words, mask=inside)
        tl.store(to_accepted_ptr + first + words, told, mask=inside)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    source = tl.load(index_ptr + row) * hidden_stride
    values = tl.load(hidden_ptr + source + columns, mask=inside)
    tl.store(to_rows_ptr + row.to(tl.int64) * width + columns, values, mask=inside)
