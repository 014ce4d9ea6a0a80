"""Trains an EAGLE-3 head for a target from a folder of text, and prints how to serve it.

python examples/train_head.py --target models/foredraft-demo --data foredraft gateway --out
/tmp/head

The default sizes are for a first try on a CPU. docs/training.md has those for a head that pays.
"""

import argparse
import subprocess
import sys
from pathlib import Path

parser = argparse.ArgumentParser(description="Trains a small EAGLE-3 head.")
parser.add_argument("--target", type=Path, required=True, help="Hugging Face directory")
parser.add_argument("--data", type=Path, nargs="+", required=True, help="folders of text")
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--windows", type=int, default=24, help="windows that the target writes")
parser.add_argument("--window", type=int, default=96, help="tokens of a window")
options = parser.parse_args()

command = [sys.executable, "-m", "training", "draft", "--algorithm=EAGLE3", "--no-compile"]
command += ["--target", options.target, "--out", options.out, "--data", *options.data]
command += [f"--windows={options.windows}", f"--window={options.window}"]
command += [f"--prompt={options.window // 4}", "--generate-batch=32", "--batch=8"]
command += [f"--steps={options.steps}", f"--warmup={options.steps // 10}"]
if status := subprocess.run(command, check=False).returncode:
    sys.exit(status)

print(f"""
Serve it:
  foredraft serve --model-path {options.target} --speculative-algorithm EAGLE3 \\
      --speculative-draft-model-path {options.out}""")
