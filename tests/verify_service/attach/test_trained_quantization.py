"""Which quantisation of its target a head was made for, by names and files."""

from pathlib import Path

import pytest

from foredraft.models.config import ModelConfig
from foredraft.models.quantization_config import Quantization, on_load
from testing.quantized_checkpoints import FORMATS, tiny_llama, write
from verify_service.attach.trained_quantization import quantization_note

RAW = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def served(form: str) -> Quantization | None:
    if form == "plain":
        return None
    return ModelConfig.from_dict(RAW | {"quantization_config": FORMATS[form].config}).quantization


@pytest.mark.parametrize(
    ("name", "form", "made_for"),
    [
        ("Qwen/Qwen3-8B", "plain", ""),
        ("Qwen/Qwen3-8B", "fp8-block", "plain"),
        ("Qwen/Qwen3-8B-FP8", "fp8-block", ""),
        ("RedHatAI/Qwen3-8B-FP8-dynamic", "float-channel", ""),
        ("RedHatAI/Qwen3-8B-FP8-dynamic", "plain", "fp8"),
        ("RedHatAI/Llama-3.1-8B-Instruct-quantized.w4a16", "awq", ""),
        ("RedHatAI/Llama-3.1-8B-Instruct-quantized.w4a16", "plain", "int4"),
        ("RedHatAI/Llama-3.1-8B-Instruct-quantized.w8a8", "packed-int8", ""),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "gptq-int8", ""),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "gptq", "int8"),
        ("Qwen/Qwen3-8B-AWQ", "gptq", ""),
        ("nvidia/Qwen3-8B-NVFP4", "fp8-block", "fp4"),
        ("unsloth/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf", "packed-int8-32", ""),
        ("fp8/Qwen3-8B", "plain", ""),
        ("", "fp8-block", ""),
    ],
)
def test_names_of_published_checkpoints(name: str, form: str, made_for: str) -> None:
    note = quantization_note(name, "served", served(form))
    if not made_for:
        assert note == ""
        return
    assert f"made for {name} with {made_for} weights" in note
    assert note.endswith("that may cost acceptance, never text")


def test_a_directory_says_it_itself(tmp_path: Path) -> None:
    plain = tiny_llama(tmp_path / "model-fp8")
    write(plain, tmp_path / "small", FORMATS["awq"])
    assert quantization_note(str(plain), "served", None) == ""
    assert quantization_note(str(tmp_path / "small"), "served", served("gptq")) == ""
    assert "with int4 weights" in quantization_note(str(tmp_path / "small"), "served", None)
    # What this server does not read goes by its name.
    (plain / "config.json").write_text("{}")
    assert "with fp8 weights" in quantization_note(str(plain), "served", None)


def test_the_very_checkpoint_is_another_one_only_where_it_is_quantised_on_load() -> None:
    own = "organisation/model"
    assert quantization_note(own, own, served("fp8-block")) == ""
    loaded = on_load(None, "int8", None, Path())
    assert "this target's are int8" in quantization_note(own, own, loaded)
