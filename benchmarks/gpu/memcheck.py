"""The tests of the Triton kernels under `compute-sanitizer --tool memcheck`, some side by side.

    python -m benchmarks.gpu.memcheck

They run without torch's caching allocator, which gives tensors parts of larger blocks: an access
beyond a tensor would still be one within its block. Exit status 1 if a test fails or an access was
wrong.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

# Files, and which of their tests where there are very many.
GROUPS = {
    "attention": (
        ["tests/attention/test_triton.py"],
        "brute_force and (heads1 or heads2) or plan or blocks or causal or padding",
    ),
    "8-bit KV": (["tests/attention/test_eight_bit.py"], ""),
    "layers": (
        ["tests/layers/test_fused.py", "tests/layers/test_skinny_gemm.py"],
        "dtype1 and (test_norm or adding or gated) or rotates and (16-6 or 80-70) or angles "
        "or 30-72 or 136-512 or 9000",
    ),
    "sampling": (["tests/sampling/test_triton_sampling.py"], ""),
    "trees, steps": (
        [
            "tests/verify_service/executor/test_triton_steps.py",
            "tests/verify_service/executor/test_triton_adjust.py",
            "tests/trees/test_fixed_shape_trees.py",
        ],
        "",
    ),
    "drafts": (
        [
            "tests/draft_service/test_device_beams.py",
            "tests/draft_service/test_draft_plan.py",
            "tests/verify_service/executor/test_hand_over.py",
        ],
        "",
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    groups = parser.parse_args().groups
    sanitizer = shutil.which("compute-sanitizer") or next(
        iter(glob("/usr/local/cuda*/bin/compute-sanitizer")), ""
    )
    if not sanitizer:
        raise SystemExit("there is no compute-sanitizer here; it comes with CUDA's toolkit")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(groups)) as pool:
        rights = list(pool.map(lambda name: _check(sanitizer, name, Path(folder)), groups))
    return 0 if all(rights) else 1


def _check(sanitizer: str, name: str, folder: Path) -> bool:
    files, chosen = GROUPS[name]
    log = folder / f"{name}.log"
    command = [sanitizer, "--tool", "memcheck", "--log-file", str(log), sys.executable]
    command += ["-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    if chosen:
        command += ["-k", chosen]
    ran = subprocess.run(
        command,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    found = log.read_text() if log.exists() else ""
    summary = re.findall(r"ERROR SUMMARY: (\d+) error", found)
    right = ran.returncode == 0 and summary == ["0"]
    tests = ran.stdout.splitlines()[-1] if ran.stdout else ran.stderr[-200:]
    print(f"{name}: {tests}; {summary[0] if summary else '?'} errors", flush=True)
    if not right:
        print(found[-4000:], ran.stdout[-4000:], sep="\n")
    return right


if __name__ == "__main__":
    sys.exit(main())
