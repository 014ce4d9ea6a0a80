"""Measures one draft step on a GPU by itself: the time of the device, and what the host adds.

An EAGLE-3 head of Llama-3.1-8B's shape (`chain`, `tree`), and drafts of Qwen3-8B's: EAGLE-3's
chain of 7 and its tree, blocks of DFlash and DSpark, P-EAGLE.

    python -m benchmarks.gpu.draft_step --batch 1 8 32 --profile 8

Weights are random. The floor of Qwen3-8B's drafts is the time in which an H200 reads their weights.
The host's part is the time of a step beyond its kernels: reading the message, packing, launching,
unpacking, and building the answer.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu.needed import need_gpu
from benchmarks.gpu.shapes import (
    BANDWIDTH,
    QWEN_DRAFTS,
    qwen_draft_bytes,
    write_checkpoints,
    write_qwen_checkpoints,
)
from draft_service.drafters.heads import HeadDrafter
from foredraft.api.draft.v1 import draft_pb2
from foredraft.config.services import DraftConfig
from foredraft.models.config import ModelConfig
from foredraft.transport.base import HiddenReader

# Steps, topk, draft tokens.
MODES = {
    "chain": (3, 1, 4),
    "tree": (5, 8, 32),
    "eagle3": (7, 1, 8),
    "eagle3-tree": (5, 8, 32),
    "peagle": (7, 1, 8),
}
BLOCKS = ("dflash", "dspark")  # their limits follow from --block-size
PAGE, CONTEXT, ROWS = 16, 1024, 3


class Ring(HiddenReader):
    """Hidden states in memory of this process."""

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype) -> None:
        self.ring = torch.randn(num_rows, width, device="cuda").to(dtype)

    def read(self, rows: draft_pb2.HiddenRows) -> torch.Tensor:
        """See HiddenReader."""
        assert self.ring is not None
        return self.ring[rows.arena_row : rows.arena_row + rows.num_rows]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--modes", nargs="+", default=[*MODES, *BLOCKS], choices=[*MODES, *BLOCKS])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--block-size", type=int, default=8, help="rows of a block")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--profile", type=int, default=0, help="list kernels at this batch")
    args = parser.parse_args()
    need_gpu()
    for mode in args.modes:
        drafter, config = load(mode, args.block_size)
        measure(mode, drafter, config, args)


def load(mode: str, block_size: int) -> tuple[HeadDrafter, ModelConfig]:
    """Loads the draft of a mode with random weights; returns it and its target's configuration."""
    with tempfile.TemporaryDirectory() as folder:
        name = mode.removesuffix("-tree")
        algorithm = QWEN_DRAFTS[name][0] if name in QWEN_DRAFTS else "EAGLE3"
        target, head = (
            write_qwen_checkpoints(Path(folder), name, block_size)
            if name in QWEN_DRAFTS
            else write_checkpoints(Path(folder), 32)
        )
        drafter = HeadDrafter.load(
            DraftConfig(
                model_path=str(target),
                speculative_algorithm=algorithm,
                speculative_draft_model_path=str(head),
                load_format="dummy",
                speculative_draft_load_format="dummy",
                dtype="bfloat16",
                device="cuda",
            )
        )
        return drafter, ModelConfig.from_dir(target)


def measure(mode: str, drafter: HeadDrafter, config: ModelConfig, args: argparse.Namespace) -> None:
    """Prints a line for every batch."""
    block = args.block_size
    steps, topk, tokens = (block, 1, block + 1) if mode in BLOCKS else MODES[mode]
    limits = draft_pb2.TreeLimits(num_steps=steps, topk=topk, num_draft_tokens=tokens)
    info = drafter.info()
    batch = max(args.batch)
    proposer, _ = drafter.attach(
        draft_pb2.AttachRequest(
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            vocab_size=config.vocab_size,
            target_fingerprint=config.fingerprint,
            page_size=PAGE,
            num_pages=batch * CONTEXT // PAGE,
            max_batch=batch,
            max_context=CONTEXT,
            limits=limits,
            draft_sampling="coupled",
        )
    )
    proposer.hidden = Ring(4096, info.hidden.width, torch.bfloat16)
    started = time.perf_counter()
    proposer.prepare()
    print(
        f"{mode}: prepared in {time.perf_counter() - started:.1f} s,"
        f" {torch.cuda.memory_allocated() / 2**30:.2f} GiB allocated"
    )
    name = mode.removesuffix("-tree")
    floor = ""
    if name in QWEN_DRAFTS:
        floor = f" (floor {qwen_draft_bytes(name, steps) / BANDWIDTH * 1e3:.2f})"
    for size in args.batch:
        walls, kernels = [], []
        for step in range(args.steps):
            message = request(size, step, limits, args.temperature).SerializeToString()
            started = time.perf_counter()
            response = proposer.step(draft_pb2.StepRequest.FromString(message))
            response.SerializeToString()
            walls.append(time.perf_counter() - started)
            kernels.append(replay(proposer, size, args.temperature > 0))
        wall, device = statistics.median(walls[10:]) * 1e3, statistics.median(kernels[10:]) * 1e3
        print(
            f"{mode} batch {size}: step {wall:.3f} ms, device {device:.3f} ms{floor},"
            f" host {wall - device:.3f} ms",
            flush=True,
        )
        if size == args.profile:
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA]
            ) as profile:
                for step in range(args.steps, args.steps + 10):
                    proposer.step(request(size, step, limits, args.temperature))
            table = profile.key_averages().table(
                sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=70
            )
            print(table)
    proposer.close()


@torch.inference_mode()
def replay(proposer, size: int, sampled: bool) -> float:  # type: ignore[no-untyped-def]
    """Returns the seconds of the step's graphs, replayed one after another."""
    graphs = proposer._fixed_steps.graphs
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    graphs.extend(size)
    graphs.draft(size, sampled, False)
    last.record()
    last.synchronize()
    return first.elapsed_time(last) * 1e-3


def request(
    size: int, step: int, limits: draft_pb2.TreeLimits, temperature: float
) -> draft_pb2.StepRequest:
    """Returns a message with a few tokens for every sequence; the first step begins them with a
    prompt.
    """
    message = draft_pb2.StepRequest(step=step + 1)
    prompt = 256
    for slot in range(size):
        news = message.sequences.add(slot=slot)
        count, position = (prompt, 0) if step == 0 else (ROWS, prompt + (step - 1) * ROWS)
        if step == 0:
            news.begin.sampling.temperature = temperature
            news.begin.sampling.top_p = 1.0
            news.begin.sampling.seed = slot
        news.position = position
        news.tokens.extend(range(position + 2, position + 2 + count))
        pages_before = -(-max(position - 1, 0) // PAGE)
        pages = -(-(position + count - 1) // PAGE)
        if pages > pages_before:
            first = slot * CONTEXT // PAGE
            news.first_page = pages_before
            news.new_pages.extend(range(first + pages_before, first + pages))
        news.hidden.arena_row = (step * 32 + slot * ROWS) % 3000
        news.hidden.num_rows = count - (step == 0)
        news.propose.CopyFrom(limits)
    return message


if __name__ == "__main__":
    main()
