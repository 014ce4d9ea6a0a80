"""Measures one draft step through the real client and service: the cost of two processes.

    python -m benchmarks.draft_roundtrip --out benchmarks/results

Starts `python -m draft_service` with NGRAM, attaches as the verifier does and decodes text that
repeats, three committed tokens a sequence and step. Prints a table and writes JSON. `draft` is the
draft's own time as it reports it; `transport` is the rest: messages, gRPC, threads, the socket.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks.results_folder import results_folder
from foredraft.api.draft.v1 import draft_pb2
from testing.ready import wait_ready
from verify_service.connection.client import DraftClient

PERIOD = 50
TOKENS_PER_STEP = 3


def text(slot: int, start: int, count: int) -> list[int]:
    """Returns part of a sequence that repeats itself after PERIOD tokens."""
    return [slot * PERIOD + i % PERIOD for i in range(start, start + count)]


def step_request(step: int, num_sequences: int, num_draft_tokens: int) -> draft_pb2.StepRequest:
    """Returns a decoding step: a few committed tokens of each sequence, and a request for a
    tree of each.
    """
    request = draft_pb2.StepRequest(step=step)
    for slot in range(num_sequences):
        position = 0 if step == 1 else 3 * PERIOD + (step - 2) * TOKENS_PER_STEP
        count = 3 * PERIOD if step == 1 else TOKENS_PER_STEP
        sequence = request.sequences.add(
            slot=slot, position=position, tokens=text(slot, position, count)
        )
        sequence.propose.num_draft_tokens = num_draft_tokens
        if step == 1:
            sequence.begin.scope = "benchmark"
    return request


def measure(
    client: DraftClient, num_sequences: int, num_draft_tokens: int, steps: int, think: float
) -> dict[str, float | int]:
    """Measures steps of one attach.

    `think` is the pause between two steps, in which a verifier would compute.
    """
    while not client.epoch:
        time.sleep(0.01)
    round_trips: list[float] = []
    drafting: list[float] = []
    proposed = 0
    for step in range(1, steps + 1):
        request = step_request(step, num_sequences, num_draft_tokens)
        started = time.perf_counter()
        client.send(request)
        response = client.receive()
        round_trips.append((time.perf_counter() - started) * 1e6)
        drafting.append(response.extend_microseconds + response.draft_microseconds)
        proposed += sum(len(proposal.tokens) for proposal in response.proposals)
        time.sleep(think)
    warm = len(round_trips) // 10
    ordered = sorted(round_trips[warm:])
    transport = [a - b for a, b in zip(round_trips[warm:], drafting[warm:], strict=True)]
    return {
        "sequences": num_sequences,
        "round_trip_us_p50": statistics.median(ordered),
        "round_trip_us_p99": ordered[int(len(ordered) * 0.99)],
        "draft_us_p50": statistics.median(drafting[warm:]),
        "transport_us_p50": statistics.median(transport),
        "proposed_per_step": proposed / steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 48])
    parser.add_argument("--num-draft-tokens", type=int, default=12)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--think", type=float, default=0.002, help="seconds between two steps")
    parser.add_argument("--out", type=results_folder, default="benchmarks/results")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        target = f"unix:{folder}/draft.sock"
        command = [sys.executable, "-m", "draft_service", "--listen", target]
        command += ["--speculative-num-draft-tokens", str(args.num_draft_tokens)]
        process = subprocess.Popen([*command, "--log-level", "warning"])
        try:
            wait_ready(target, 30)
            for num_sequences in args.sequences:
                client = DraftClient(
                    target,
                    lambda info, epoch: draft_pb2.AttachRequest(
                        protocol=info.protocol,
                        epoch=epoch,
                        vocab_size=10_000,
                        max_batch=64,
                        max_context=100_000,
                    ),
                    step_timeout=1.0,
                )
                client.start()
                client.allow_attach()
                rows.append(
                    measure(client, num_sequences, args.num_draft_tokens, args.steps, args.think)
                )
                client.close()
        finally:
            process.terminate()
            process.wait()
    print(" | ".join(rows[0]))
    for row in rows:
        print(" | ".join(f"{v:.0f}" if isinstance(v, float) else str(v) for v in row.values()))
    result = {"cpus": os.cpu_count(), "steps": args.steps, "think_s": args.think, "rows": rows}
    (args.out / "draft_roundtrip.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
