"""Targets of all kinds, from transformers' own directories, give the features that a server gives
their heads, and write their own text.
"""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from foredraft.errors import CheckpointError
from foredraft.models.registry import resolve_model_path
from testing import gguf_files
from testing.quantized_checkpoints import FORMATS, reference, tiny_llama, write
from training.draft.target import Target
from training.lm.loading import load_model

HAS_OPTIMUM = importlib.util.find_spec("optimum") is not None
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def make(directory: Path, family: str, **changes: Any) -> Any:
    """Creates and saves a model with random weights, biases included."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2) if parameter.dim() > 1 else parameter.normal_(1, 0.3)
    model.save_pretrained(directory)
    return model


def read(directory: Path) -> Target:
    return Target(directory, torch.device("cpu"), torch.float32)


def prompts() -> torch.Tensor:
    return torch.randint(3, 97, (2, 64), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": SCALED},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_llama_that_is_not_plain_is_computed_as_it_is(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    model = make(tmp_path, "Llama", **changes)
    target = read(tmp_path)
    with torch.no_grad():
        hidden, _ = target.features(prompts(), ())
        torch.testing.assert_close(
            F.linear(hidden, target.output_weight), model(prompts()).logits, rtol=1e-3, atol=1e-3
        )


def test_a_teacher_is_a_plain_llama(tmp_path: Path) -> None:
    """`train lm --teacher` computes no other, and its weights would fit."""
    make(tmp_path, "Llama", rope_parameters=SCALED)
    with pytest.raises(CheckpointError, match=r"config\.json: not a plain Llama"):
        load_model(tmp_path, "cpu")


def test_a_quantized_llama_is_computed_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    plain = tiny_llama(tmp_path / "plain")
    meant = write(plain, tmp_path / "quantized", FORMATS["packed-32"])
    target = read(tmp_path / "quantized")
    with torch.no_grad():
        hidden, _ = target.features(prompts(), ())
        want = reference(plain, meant)(prompts()).logits.float()
        torch.testing.assert_close(
            F.linear(hidden, target.output_weight), want, rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Phi"])
def test_the_last_stream_leaves_the_last_layer_before_the_norm(family: str, tmp_path: Path) -> None:
    """As a verifier gives it to a head (`default_aux_layers`, `spread_layers`)."""
    model = make(tmp_path, family)
    with torch.no_grad():
        hidden, (first, last) = read(tmp_path).features(prompts(), (1, 2))
        norm = model.model.final_layernorm if family == "Phi" else model.model.norm
        torch.testing.assert_close(norm(last), hidden, rtol=1e-4, atol=1e-4)
        want = model(prompts(), output_hidden_states=True).hidden_states[1]
        torch.testing.assert_close(first, want, rtol=1e-4, atol=1e-4)


def test_a_target_writes_what_it_thinks_likeliest(tmp_path: Path) -> None:
    """Whatever its generation_config.json asks of others: a server has no such defaults."""
    model = make(tmp_path, "Qwen3", eos_token_id=None)
    model.generation_config.repetition_penalty = 1.5
    model.generation_config.save_pretrained(tmp_path)
    with torch.no_grad():
        written = read(tmp_path).generate(prompts(), 24, temperature=0.0, seed=0)
        choices = model(written[:, :-1]).logits.argmax(2)
    assert torch.equal(written[:, 64:], choices[:, 63:])


@pytest.mark.parametrize(
    "form",
    [
        pytest.param("gptq", marks=pytest.mark.skipif(HAS_OPTIMUM, reason="it may be run")),
        "modelopt",
    ],
)
def test_a_quantization_that_transformers_does_not_run_is_refused(
    form: str, tmp_path: Path
) -> None:
    plain = tiny_llama(tmp_path / "plain")
    write(plain, tmp_path / "quantized", FORMATS[form])
    with pytest.raises(CheckpointError, match=r"quantized: transformers .*; train on the plain"):
        read(tmp_path / "quantized")


@pytest.mark.parametrize("case", ["frequencies", "head", "beside", "another head"])
def test_what_a_server_passes_over_is_no_obstacle(case: str, tmp_path: Path) -> None:
    model = make(tmp_path, "Llama", tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    extra = {
        "frequencies": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
        "head": {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        "another head": {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1},
        "beside": {"base_model.model.lora_A.weight": torch.ones(2, 2)},
    }[case]
    if case == "beside":
        save_file(extra, tmp_path / "adapter_model.safetensors")
    else:
        save_file(tensors | extra, file, metadata={"format": "pt"})
    if case == "another head":
        with pytest.raises(CheckpointError, match=r"lm_head\.weight is not model\.embed_tokens"):
            read(tmp_path)
        return
    target = read(tmp_path)
    assert target.is_own
    with torch.no_grad():
        expected = model(prompts()).logits
    torch.testing.assert_close(target.logits(target.features(prompts(), ())[0]), expected)


def test_keys_without_a_value_have_their_defaults(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500.0}
    model = make(tmp_path, "Llama", num_key_value_heads=2, rope_parameters=rope)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text()) | {"num_key_value_heads": None, "head_dim": None}
    config |= {"rope_parameters": {"rope_type": "default"}, "rope_theta": 500.0}
    del config["rms_norm_eps"]
    file.write_text(json.dumps(config))
    target = read(tmp_path)
    assert target.is_own
    hidden, _ = target.features(prompts(), ())
    with torch.no_grad():
        torch.testing.assert_close(target.logits(hidden), model(prompts()).logits)


def test_a_quantized_gguf_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = gguf_files.write(tmp_path / "tiny.gguf", lambda name: "Q8_0" if "blk" in name else "F16")
    with pytest.raises(CheckpointError, match="train on the plain checkpoint"):
        read(resolve_model_path(file))


def test_logits_are_capped_where_the_target_caps_them(tmp_path: Path) -> None:
    model = make(tmp_path, "Gemma2", head_dim=16, final_logit_softcapping=2.0)
    hidden, _ = read(tmp_path).features(prompts(), ())
    with torch.no_grad():
        expected = model(prompts()).logits
    assert expected.abs().max() > 1.9
    torch.testing.assert_close(read(tmp_path).logits(hidden), expected)


@pytest.mark.parametrize("family", ["OPT", "GPTNeoX", "Mamba"])
def test_a_target_of_another_form_is_refused(family: str, tmp_path: Path) -> None:
    make(tmp_path, family, **({"word_embed_proj_dim": 32} if family == "OPT" else {}))
    with pytest.raises(
        CheckpointError, match=rf"{family}ForCausalLM has no layers at model\.layers"
    ):
        read(tmp_path)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"{bad", "config.json"),
        ("config.json", b"[]", "config.json"),
        ("config.json", b'{"architectures": ["Qwen3ForCausalLM"]}', "model_type"),
        ("config.json", b'{"architectures": ["LlamaForCausalLM"]}', "vocab_size is missing"),
        ("model.safetensors", b"\x08" + bytes(7) + b"{}      ", ""),
        ("model.safetensors", None, ""),
    ],
)
def test_a_broken_target_is_named(
    name: str, content: bytes | None, message: str, family: str, tmp_path: Path
) -> None:
    make(tmp_path, family)
    if content is None:
        content = (tmp_path / name).read_bytes()[:-100]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{re.escape(str(tmp_path))}.*{message}"):
        read(tmp_path)


def test_a_target_that_lacks_weights_is_not_filled_up_with_random_ones(tmp_path: Path) -> None:
    make(tmp_path, "Qwen3")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        read(tmp_path)
