"""Steps of a target on a CPU with quantised weights, beside float32 in the same run.

    python -m benchmarks.cpu_quantized --shape gemma-270m llama-1b --out benchmarks/results

Weights are random, which changes no time. Forms take turns, and each figure is the least of
several repetitions, so that a busy moment of a shared machine hits all alike. `q8_0`, `q6_k`,
`q4_k` and `q4_k_m` are what GGUF files of these types are served as, with llama.cpp's types for
widths that are no multiple of 256. The floor is the bytes that a row reads over the bandwidth of a
plain read.
"""

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.results_folder import results_folder
from foredraft.attention.cpu import CpuAttention
from foredraft.cpu.threads import use_threads
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.decoder import DecoderModel
from foredraft.models.loader import load_model
from foredraft.runner.batch import SequenceRows
from foredraft.runner.model_runner import ModelRunner

ROWS = (1, 2, 4, 8, 16)
PROMPT, CONTEXT, PAGE_SIZE = 512, 256, 32
READ_BYTES = 400_000_000
SHAPES: dict[str, dict[str, Any]] = {
    "gemma-270m": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "llama-1b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
}
GGUF_FORMS = {"q8_0": "Q8_0", "q6_k": "Q6_K", "q4_k": "Q4_K", "q4_k_m": "Q4_K"}
FORMS = ("float32", "int8", "int4", *GGUF_FORMS)
INSTEAD = {"Q6_K": "Q8_0", "Q4_K": "Q5_0", "Q8_0": "Q8_0"}  # in rows of other widths


def main() -> None:
    """Measures, prints a table for each shape, and writes cpu_quantized.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--out", type=results_folder, default="benchmarks/results")
    arguments = parser.parse_args()
    use_threads(arguments.threads)
    results = {name: measure(SHAPES[name], arguments.repetitions) for name in arguments.shape}
    (arguments.out / "cpu_quantized.json").write_text(json.dumps(results, indent=1))


def measure(shape: dict[str, Any], repetitions: int) -> dict[str, Any]:
    """Milliseconds of steps by form and number of rows, and bytes of weights."""
    runners = {form: ModelRunner(*_loaded(shape, form)) for form in FORMS}
    gc.collect()
    num_bytes = {form: _num_bytes(runner.model) for form, runner in runners.items()}
    buffer = torch.ones(READ_BYTES // 4)
    best: dict[tuple[str, int], float] = {}
    for repetition in range(repetitions + 1):
        for form, runner in runners.items():
            for count in (*ROWS, PROMPT):
                if count == PROMPT and repetition > 2:
                    continue
                _keep_least(best, (form, count), repetition, lambda: _step(runner, count))  # noqa: B023
        _keep_least(best, ("read", 0), repetition, buffer.sum)
    bandwidth = READ_BYTES / best[("read", 0)]
    print("| | MB | floor |", " | ".join(f"{n} rows" for n in ROWS), "| prompt of", PROMPT, "|")
    for form in FORMS:
        times = [f"{best[(form, count)] * 1e3:.1f}" for count in (*ROWS, PROMPT)]
        floor = num_bytes[form] / bandwidth * 1e3
        print(f"| {form} | {num_bytes[form] / 1e6:.0f} | {floor:.1f} | {' | '.join(times)} |")
    return {
        "bandwidth": bandwidth,
        "bytes": num_bytes,
        "ms": {form: {n: best[(form, n)] * 1e3 for n in (*ROWS, PROMPT)} for form in FORMS},
    }


def _keep_least(best: dict[Any, float], key: Any, repetition: int, job: Any) -> None:
    started = time.perf_counter()
    job()
    if repetition:
        seconds = time.perf_counter() - started
        best[key] = min(best.get(key, seconds), seconds)


def _loaded(shape: dict[str, Any], form: str) -> tuple[DecoderModel, PagedKV, CpuAttention]:
    raw = dict(shape)
    if form in GGUF_FORMS:
        raw["quantization_config"] = {"quant_method": "gguf", "types": _types(shape, form)}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        kind = form if form.startswith("int") else "unquant"
        model = load_model(folder, torch.float32, load_format="dummy", quantization=kind)
    num_pages = (CONTEXT + max(ROWS) + PROMPT) // PAGE_SIZE + 1
    kv = PagedKV.for_model(model.config, num_pages, PAGE_SIZE, torch.float32, "cpu")
    return model, kv, CpuAttention()


def _types(shape: dict[str, Any], form: str) -> dict[str, str]:
    """Types of the matrices of a GGUF file; `q4_k_m` has Q6_K for the table, and for values and
    the last projection of half the layers.
    """
    hidden, mlp, count = (
        shape[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    heads = shape["num_attention_heads"] * shape.get(
        "head_dim", hidden // shape["num_attention_heads"]
    )
    inputs = {f"self_attn.{name}_proj": hidden for name in "qkv"} | {"self_attn.o_proj": heads}
    inputs |= {"mlp.gate_proj": hidden, "mlp.up_proj": hidden, "mlp.down_proj": mlp}
    widths = {
        f"model.layers.{i}.{name}": width for i in range(count) for name, width in inputs.items()
    }
    finer = {"model.embed_tokens"}
    for i in range(count):
        if i < count // 8 or i >= 7 * count // 8 or (i - count // 8) % 3 == 2:
            finer |= {f"model.layers.{i}.{name}" for name in ("self_attn.v_proj", "mlp.down_proj")}
    found = {}
    for name, width in (widths | {"model.embed_tokens": hidden}).items():
        kind = "Q6_K" if form == "q4_k_m" and name in finer else GGUF_FORMS[form]
        found[name] = kind if width % 256 == 0 else INSTEAD[kind]
    return found


def _num_bytes(model: DecoderModel) -> int:
    return sum(one.numel() * one.element_size() for one in model.parameters())


def _step(runner: ModelRunner, count: int) -> None:
    pages = list(range(runner.kv.num_pages))
    tokens = [1000 + i for i in range(count)]
    first, wanted = (0, "last") if count == PROMPT else (CONTEXT, "all")
    runner.forward([SequenceRows.chunk(pages, first, tokens, wanted)])


if __name__ == "__main__":
    main()
