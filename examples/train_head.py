"""Trains an EAGLE-3 head for a target from a folder of text, measures it on text that was held out,
and prints how to serve it.

python examples/train_head.py --target models/foredraft-demo --data foredraft gateway
--validation verify_service --out /tmp/head

The default sizes are for a first try on a CPU. docs/training.md has those for a head that pays.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

parser = argparse.ArgumentParser(description="Trains a small EAGLE-3 head.")
parser.add_argument("--target", type=Path, required=True, help="Hugging Face directory")
parser.add_argument("--data", type=Path, nargs="+", required=True, help="folders of text")
parser.add_argument("--validation", type=Path, nargs="*", default=[], help="held-out text")
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--windows", type=int, default=32, help="windows that the target writes")
parser.add_argument("--window", type=int, default=128, help="tokens of a window")
options = parser.parse_args()

if not (options.target / "config.json").is_file():
    parser.error(f"--target {options.target}: no config.json; not a Hugging Face directory")
if options.window < 4:
    parser.error(f"--window must be at least 4, not {options.window}")
# Few tokens in a step and many steps: so a head learns most in a minute of a CPU.
vocab_size = json.loads((options.target / "config.json").read_text())["vocab_size"]
command = [sys.executable, "-m", "training", "draft", "--algorithm=EAGLE3", "--no-compile"]
command += ["--target", options.target, "--out", options.out, "--data", *options.data]
command += [f"--windows={options.windows}", "--text-windows=2000", f"--window={options.window}"]
command += [f"--prompt={options.window // 4}", "--generate-batch=32", "--batch=2", "--lr=1e-2"]
command += ["--unroll-steps=2", f"--draft-vocab-size={min(2048, vocab_size)}"]
command += [f"--steps={options.steps}", f"--warmup={options.steps // 10}"]
command += ["--eval-prompts=8", "--eval-prompt=64", "--eval-new-tokens=48"]
command += ["--topk=4", "--tree-tokens=8", "--validation", *options.validation]
if status := subprocess.run(command, check=False).returncode:
    sys.exit(status)

beside = Path(sys.executable).with_name("foredraft")
program = "foredraft" if shutil.which("foredraft") or not beside.exists() else beside
serve = [program, "serve", "--model-path", options.target, "--speculative-algorithm", "EAGLE3"]
print(f"""
Serve it:
  {shlex.join(map(str, serve))} \\
      {shlex.join(["--speculative-draft-model-path", str(options.out)])}""")
