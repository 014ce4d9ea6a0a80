"""Loading checkpoints: whole, in parts, and broken in every way that can be named."""

import json
import os
import subprocess
import sys

import pytest
import safetensors.torch
import torch

from foredraft.errors import CheckpointError
from foredraft.models import loader
from foredraft.models.config import ModelConfig
from foredraft.models.loader import load_model
from foredraft.models.weight_files import checkpoint_files


@pytest.fixture
def copy(checkpoints, tmp_path):
    """A copy of the llama-bias checkpoint to break: (directory, its tensors)."""
    source, _ = checkpoints("llama-bias")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    return tmp_path, safetensors.torch.load_file(source / "model.safetensors")


def save(directory, tensors):
    safetensors.torch.save_file(tensors, directory / "model.safetensors")


def test_every_weight_arrives(variant):
    name, directory, model = variant
    loaded = load_model(directory)
    offset = loaded.config.norm_offset
    targets = loaded.targets()
    for key, weight in model.state_dict().items():
        if name.startswith("gemma3") and key.endswith("norm.weight"):
            weight = weight + offset
        if key in targets:
            assert torch.equal(targets[key].memory, weight), key
        else:
            assert key == "lm_head.weight"
            assert loaded.config.tie_word_embeddings
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in model.parameters())


def test_indexed_checkpoint(copy):
    directory, tensors = copy
    names = list(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        safetensors.torch.save_file({name: tensors[name] for name in part}, directory / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    targets = load_model(directory).targets()
    assert all(torch.equal(targets[name].memory, tensors[name]) for name in names)
    (directory / "b.safetensors").unlink()
    missing = r"index\.json names b\.safetensors, which is not there"
    with pytest.raises(CheckpointError, match=missing):
        checkpoint_files(directory)  # before memory is allocated
    index.write_text(json.dumps({"weight_map": {"x": "../b.safetensors"}}))
    with pytest.raises(CheckpointError, match="not a file beside the index"):
        load_model(directory)
    save(directory, tensors)  # what was in parts is put together, and the index forgotten
    load_model(directory)


def test_missing_tensors_are_named(copy):
    directory, tensors = copy
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    save(directory, tensors)
    with pytest.raises(
        CheckpointError, match=r"missing.*model\.layers\.1\.self_attn\.k_proj\.bias"
    ):
        load_model(directory)


def test_unexpected_tensors_are_named(copy):
    directory, tensors = copy
    save(directory, tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    load_model(directory)
    save(directory, tensors | {"model.layers.3.mlp.up_proj.weight": torch.ones(4)})
    with pytest.raises(CheckpointError, match=r"unexpected.*layers\.3\.mlp\.up_proj"):
        load_model(directory)


def test_misshaped_tensors_are_named(copy):
    directory, tensors = copy
    tensors["model.norm.weight"] = torch.ones(33)
    save(directory, tensors)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[33\].*\[32\]"):
        load_model(directory)


def test_integer_weights_are_refused(copy):
    directory, tensors = copy
    tensors["model.norm.weight"] = torch.ones(32, dtype=torch.int8)
    save(directory, tensors)
    with pytest.raises(CheckpointError, match="int8"):
        load_model(directory)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [("nan", "float32"), ("inf", "bfloat16"), ("-inf", "float32"), ("1e5", "float16")],
)
def test_weights_that_are_not_finite_are_named(copy, value, dtype):
    """A weight that a smaller type cannot hold becomes infinite in it."""
    directory, tensors = copy
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][7, 9] = float(value)
    save(directory, tensors)
    with pytest.raises(CheckpointError, match=rf"down_proj\.weight has values.*torch\.{dtype}"):
        load_model(directory, getattr(torch, dtype))


def test_truncated_and_foreign_files(copy):
    directory, tensors = copy
    save(directory, tensors)
    file = directory / "model.safetensors"
    content = file.read_bytes()
    for size, message in (
        (len(content) - 1, "truncated: tensor"),
        (100, "truncated"),
        (3, "not a"),
    ):
        file.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=message):
            load_model(directory)
    file.write_bytes(b"\x80\x02}q\x00." * 100)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        load_model(directory)
    length = int.from_bytes(content[:8], "little")
    file.write_bytes(content[:8] + b"[" * length + content[8 + length :])
    with pytest.raises(CheckpointError, match="broken"):
        load_model(directory)
    file.unlink()
    (directory / "training_args.bin").touch()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors and no index of several$"):
        load_model(directory)
    (directory / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"it has pytorch_model\.bin"):
        load_model(directory)


def test_offsets_that_lie(copy):
    directory, _ = copy
    header = json.dumps({"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}).encode()
    (directory / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(16)
    )
    with pytest.raises(CheckpointError, match="tensor x do not fit its shape"):
        load_model(directory)


@pytest.mark.parametrize(
    ("second", "num_bytes", "message"),
    [
        ([8, 16], 24, "8 bytes after the last tensor"),
        ([4, 12], 12, "tensor y begins at byte"),
        ([12, 20], 20, "tensor y begins at byte"),
    ],
)
def test_bytes_of_two_tensors_or_of_none(copy, second, num_bytes, message):
    """Such a file was cut together wrongly, whatever its tensors are; the format forbids it."""
    directory, _ = copy
    entries = {"x": [0, 8], "y": second}
    header = json.dumps(
        {name: {"dtype": "F32", "shape": [2], "data_offsets": at} for name, at in entries.items()}
    ).encode()
    file = directory / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(num_bytes))
    with pytest.raises(safetensors.SafetensorError):
        safetensors.torch.load_file(file)
    with pytest.raises(CheckpointError, match=message):
        load_model(directory)


def test_a_size_beyond_all_numbers(copy):
    directory, _ = copy
    header = b'{"x": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}'
    content = len(header).to_bytes(8, "little") + header + bytes(4)
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="broken safetensors header"):
        load_model(directory)


def test_too_little_memory(checkpoints, monkeypatch):
    monkeypatch.setattr(loader, "available_host_bytes", lambda: 1000)
    with pytest.raises(CheckpointError, match="too little memory"):
        load_model(checkpoints("llama")[0])


def test_cached_files_are_memory_that_can_be_had(monkeypatch, tmp_path):
    files = {
        "memory.max": "1000\n",
        "memory.current": "900\n",
        "memory.stat": "anon 300\nfile 600\ninactive_file 350\nactive_file 150\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(loader, "CONTROL_GROUP", tmp_path)
    assert loader.available_host_bytes() == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert loader.available_host_bytes() > 1000
    monkeypatch.setattr(loader, "CONTROL_GROUP", tmp_path / "nowhere")
    assert loader.available_host_bytes() > 1000


def test_dummy_weights_need_a_config_alone(copy):
    directory, _ = copy
    model, again = (load_model(directory, load_format="dummy") for _ in range(2))
    assert model.config == ModelConfig.from_dir(directory)
    for first, second in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(first, second)
    assert 0.01 < model.embedding.weight.std() < 0.03


def test_tied_head_in_the_file_is_skipped(checkpoints, tmp_path):
    source, _ = checkpoints("gemma3")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = safetensors.torch.load_file(source / "model.safetensors")
    save(tmp_path, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    model = load_model(tmp_path)
    assert model.lm_head.weight is model.embedding.weight
    # In another type than the weights are kept in, it may still be the same.
    load_model(tmp_path, torch.bfloat16)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][-1, -1] += 1
    save(tmp_path, tensors)
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        load_model(tmp_path)


MEASURE = """
import sys, threading, time
import torch
from foredraft.models.loader import load_model
from foredraft.models.decoder import DecoderModel
import foredraft.models.weights, tqdm

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

peak, done = 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, resident())
        time.sleep(0.001)

torch.set_num_threads(1)
torch.ones(64, 64) @ torch.ones(64, 64)
before = resident()
thread = threading.Thread(target=watch)
thread.start()
model = load_model(sys.argv[1], getattr(torch, sys.argv[2]))
done = True
thread.join()
peak = max(peak, resident())
weights = sum(p.numel() * p.element_size() for p in model.parameters())
print((peak - before) / weights)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_memory_is_near_the_weights(copy, dtype):
    """Resident memory, mapped file pages included, stays under 1.3 times the weights, whatever the
    file's type.
    """
    directory, _ = copy
    config = json.loads((directory / "config.json").read_text())
    config |= {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 32000}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
    (directory / "config.json").write_text(json.dumps(config))
    model = load_model(directory, torch.bfloat16, load_format="dummy")
    save(directory, {name: target.memory.clone() for name, target in model.targets().items()})
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(directory), dtype],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(result.stdout) < 1.3
