"""Memory and speed of the n-gram store: bytes per node, time per inserted token and per match.

    python -m benchmarks.ngram_trie --out benchmarks/results

Feeds Zipf-distributed text with repeated phrases, cut into sequences of one scope, until the trie
holds the asked number of nodes, then evicts at capacity. Prints a table, writes JSON and a plot.
One thread; resident memory is read from /proc.
"""

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.results_folder import results_folder
from draft_service.ngram.trie import MatchType, NgramDrafter, NgramRules

VOCAB = 262_144
SEQUENCE = 2_000
PROBES = 2_000


def text(rng: random.Random) -> Iterator[list[int]]:
    """Yields endless sequences: three parts new words by Zipf's law, one part phrases seen
    before.
    """
    phrases: list[list[int]] = []
    while True:
        sequence: list[int] = []
        while len(sequence) < SEQUENCE:
            if phrases and rng.random() < 0.25:
                sequence += rng.choice(phrases)
            else:
                words = [
                    min(VOCAB - 1, int(rng.paretovariate(0.7))) for _ in range(rng.randrange(5, 40))
                ]
                sequence += words
                if rng.random() < 0.1:
                    phrases.append(words)
        yield sequence[:SEQUENCE]


def resident_bytes() -> int:
    """Returns this process's resident memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmRSS in /proc/self/status")


def microseconds(samples: list[int]) -> dict[str, float]:
    """Returns median and 99th percentile of nanoseconds, in microseconds."""
    ordered = sorted(samples)
    return {
        "median": statistics.median(ordered) / 1000,
        "p99": ordered[int(len(ordered) * 0.99)] / 1000,
    }


def time_matches(
    drafter: NgramDrafter, sequences: list[list[int]], max_nodes: int
) -> dict[str, float]:
    """Returns seconds of `propose` as a sequence grows by three tokens a step, as in decoding."""
    samples: list[int] = []
    for sequence in sequences:
        drafter.begin(1, "bench")
        drafter.extend(1, sequence[: SEQUENCE // 2])
        for at in range(SEQUENCE // 2, SEQUENCE - 3, 3):
            begin = time.perf_counter_ns()
            drafter.propose(1, max_nodes)
            samples.append(time.perf_counter_ns() - begin)
            drafter.extend(1, sequence[at : at + 3])
            if len(samples) >= PROBES:
                break
        drafter.release(1)
        if len(samples) >= PROBES:
            break
    return microseconds(samples)


def measure(num_nodes: int, match_type: MatchType, max_nodes: int) -> dict[str, float | int | str]:
    """Fills a trie to `num_nodes`, its capacity, measuring as it goes; then measures matches and
    steady eviction.
    """
    source = text(random.Random(num_nodes))
    probes = [next(source) for _ in range(8)]
    rules = NgramRules(match_type=match_type)
    gc.collect()
    before = resident_bytes()
    drafter = NgramDrafter(rules, num_nodes)
    filling: list[int] = []
    while drafter.num_nodes < num_nodes:
        sequence = next(source)
        drafter.begin(0, "bench")
        begin = time.perf_counter_ns()
        drafter.extend(0, sequence)
        filling.append((time.perf_counter_ns() - begin) // len(sequence))
        drafter.release(0)
    resident = resident_bytes() - before
    evicting: list[int] = []
    for _ in range(10):
        sequence = next(source)
        drafter.begin(0, "bench")
        begin = time.perf_counter_ns()
        drafter.extend(0, sequence)
        evicting.append((time.perf_counter_ns() - begin) // len(sequence))
        drafter.release(0)
    matches = time_matches(drafter, probes, max_nodes)
    return {
        "nodes": drafter.num_nodes,
        "match_type": match_type,
        "allocated_mb": drafter.num_bytes / 1e6,
        "allocated_bytes_per_node": drafter.num_bytes / drafter.num_nodes,
        "resident_bytes_per_node": resident / drafter.num_nodes,
        "insert_us_per_token": statistics.median(filling) / 1000,
        "evicting_insert_us_per_token": statistics.median(evicting) / 1000,
        "match_us_median": matches["median"],
        "match_us_p99": matches["p99"],
    }


def plot(rows: list[dict[str, float | int | str]], path: Path) -> None:
    """Plots memory and match time over the number of nodes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (memory, speed) = plt.subplots(1, 2, figsize=(9, 3.4))
    for match_type in ("BFS", "PROB"):
        part = [row for row in rows if row["match_type"] == match_type]
        nodes = [row["nodes"] for row in part]
        memory.plot(nodes, [row["allocated_mb"] for row in part], "o-", label=match_type)
        speed.plot(
            nodes, [row["match_us_median"] for row in part], "o-", label=f"{match_type} median"
        )
        speed.plot(nodes, [row["match_us_p99"] for row in part], "o--", label=f"{match_type} p99")
    memory.set(xlabel="nodes", ylabel="MB allocated", xscale="log", yscale="log")
    speed.set(xlabel="nodes", ylabel="microseconds per match", xscale="log", yscale="log")
    memory.legend()
    speed.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--nodes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000, 5_000_000]
    )
    parser.add_argument("--max-nodes", type=int, default=11, help="nodes per proposal")
    parser.add_argument("--out", type=results_folder, default="benchmarks/results")
    args = parser.parse_args()
    kinds: tuple[MatchType, ...] = ("BFS", "PROB")
    rows = [measure(nodes, kind, args.max_nodes) for nodes in args.nodes for kind in kinds]
    columns = list(rows[0])
    print(" | ".join(columns))
    for row in rows:
        print(" | ".join(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    (args.out / "ngram_trie.json").write_text(json.dumps(rows, indent=2) + "\n")
    plot(rows, args.out / "ngram_trie.png")


if __name__ == "__main__":
    main()
