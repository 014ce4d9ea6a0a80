"""Measures captured decode steps and prompts of quantised targets at the shape of Llama-3.1-8B,
beside bfloat16.

    python -m benchmarks.gpu.quantized --batch 1 8 32 128 --kinds plain chain --prompts 2048 8192

Random weights. A step is all of a captured step, as `benchmarks.gpu.exactness` has it, with strict
exactness. The floor is the bytes of weights over the memory's measured speed.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.exactness import ROWS, prompt_ms, step_ms
from benchmarks.gpu.needed import need_gpu
from benchmarks.gpu.shapes import LLAMA_8B
from benchmarks.results_folder import results_folder
from foredraft.models.decoder import DecoderModel
from foredraft.models.loader import load_model
from verify_service.exactness import STRICT, make_exact

BANDWIDTH = 4.49e12  # bytes/s, measured on an H200
BLOCKS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
FORMS = ("bf16", "fp8", "fp8-blocks", "int4")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--kinds", nargs="+", default=["plain", "chain"], choices=list(ROWS))
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prompts", nargs="*", type=int, default=[2048])
    parser.add_argument("--layers", type=int, default=32, help="fewer for debugging")
    parser.add_argument("--out", type=results_folder, default="benchmarks/results")
    args = parser.parse_args()
    need_gpu()
    rows = []
    for form in args.forms:
        model = _model(form, args.layers)
        floor = _weight_bytes(model) / BANDWIDTH * 1e3
        print(f"{form}: {floor:.2f} ms to read the weights once", flush=True)
        with torch.inference_mode():
            for kind in args.kinds:
                for batch in args.batch:
                    ms = step_ms(model, STRICT, batch, args.context, kind)
                    rows.append(_shown(form, kind, batch, ms))
            rows += [
                _shown(form, "prompt", tokens, prompt_ms(model, STRICT, tokens))
                for tokens in args.prompts
            ]
        del model
        torch.cuda.empty_cache()
    (args.out / "gpu_quantized.json").write_text(json.dumps(rows, indent=1))
    return 0


def _model(form: str, num_layers: int) -> DecoderModel:
    config: dict[str, Any] = {**LLAMA_8B, "num_hidden_layers": num_layers}
    if form == "fp8-blocks":
        config["quantization_config"] = BLOCKS
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model = load_model(
            folder,
            dtype=torch.bfloat16,
            device="cuda",
            load_format="dummy",
            quantization=form if form in ("fp8", "int4") else "unquant",
        )
    make_exact(model, STRICT)
    return model


def _weight_bytes(model: DecoderModel) -> int:
    """Returns the bytes of all weights but the embedding, which a step hardly reads."""
    table = model.embedding.weight
    whole = sum(one.numel() * one.element_size() for one in model.parameters())
    return whole - table.numel() * table.element_size()


def _shown(form: str, kind: str, size: int, ms: float) -> dict[str, Any]:
    print(f"{form:10} {kind:6} {size:5}: {ms:8.3f} ms", flush=True)
    return {"form": form, "kind": kind, "size": size, "ms": ms}


if __name__ == "__main__":
    sys.exit(main())
