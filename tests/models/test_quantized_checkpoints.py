"""Quantised checkpoints of every format against transformers in float64 with the weights that they
stand for.
"""

import itertools
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.attention.cpu import CpuAttention
from foredraft.errors import CheckpointError
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers.linear import Linear
from foredraft.layers.quantized import ExpandedMethod, StoredMethod
from foredraft.layers.quantized_matrix import dequantize
from foredraft.layers.stored_weights import StoredMatrix, stored_tensors
from foredraft.layers.weight_scheme import GGUF_SCHEMES
from foredraft.models.config import ModelConfig
from foredraft.models.loader import load_model
from foredraft.runner.batch import SequenceRows
from foredraft.runner.model_runner import ModelRunner
from testing.quantized_checkpoints import FORMATS, Format, reference, tiny_llama, write

MOST_ERROR = 1e-5  # of logits, relative to their norm
TOKENS = torch.randint(3, 97, (21,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("plain"))


@torch.inference_mode()
def logits(directory):
    model = load_model(directory, torch.float32)
    kv = PagedKV.for_model(model.config, 16, 4, torch.float32, "cpu")
    runner = ModelRunner(model, kv, CpuAttention())
    return runner.forward([SequenceRows.chunk(list(range(6)), 0, TOKENS, "all")]).logits


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_weights_that_a_checkpoint_stands_for(name, plain, tmp_path):
    meant = write(plain, tmp_path, FORMATS[name])
    got = logits(tmp_path).double()
    with torch.inference_mode():
        want = reference(plain, meant)(torch.tensor([TOKENS])).logits[0]
    error = float((got - want).norm() / want.norm())
    assert error < MOST_ERROR


@pytest.mark.parametrize("name", FORMATS)
def test_each_bit_of_a_matrix_is_read(name):
    """Sizes that are no multiple of a block's, and a share of two ranks each way, where numbers are
    not stored together.
    """
    form = FORMATS[name]
    scheme = ModelConfig.from_dict(
        CONFIG | {"quantization_config": form.config}
    ).quantization.scheme
    weight = torch.randn(192, 384, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tensors, meant = form.pack(weight)
    for split, first, count in (("none", 0, 0), ("outputs", 96, 96), ("inputs", 128, 128)):
        if split == "outputs" and scheme.granularity == "block":
            with pytest.raises(ValueError, match="96 outputs a rank"):
                StoredMatrix(scheme, weight.shape, split, first, count, torch.device("cpu"))
            continue
        if split == "inputs" and scheme.has_order:
            with pytest.raises(ValueError, match="act-order"):
                StoredMatrix(scheme, weight.shape, split, first, count, torch.device("cpu"))
            continue
        stored = StoredMatrix(scheme, weight.shape, split, first, count, torch.device("cpu"))
        for suffix, target in stored.targets.items():
            if suffix not in tensors:
                assert target.is_optional
                continue
            assert target.takes(tuple(tensors[suffix].shape))
            given = tensors[suffix].reshape(target.shape)
            if target.memory.dim():
                given = given.narrow(target.dim, target.first, target.memory.shape[target.dim])
            target.memory.copy_(given)
        matrix = stored.decode()
        if matrix.groups is not None:
            order = torch.argsort(matrix.groups, stable=True)
            matrix.numbers = matrix.numbers[:, order]
        got = dequantize(matrix, scheme.group_size or 128, torch.float64)
        if matrix.groups is not None:
            got = got[:, torch.argsort(order)]
        want = meant
        if split != "none":
            want = meant.narrow(0 if split == "outputs" else 1, first, count)
        # Products of few bits are exact in float32 but for scales of 24 bits.
        torch.testing.assert_close(got, want, rtol=1.2e-7, atol=0)


@pytest.mark.parametrize("kind", [*FORMATS, *GGUF_SCHEMES])
def test_shares_are_refused_where_they_cut_what_is_stored_as_one(kind):
    scheme = GGUF_SCHEMES.get(kind)
    if scheme is None:
        raw = CONFIG | {"quantization_config": FORMATS[kind].config}
        scheme = ModelConfig.from_dict(raw).quantization.scheme
    refused = set()
    for split, whole, num_ranks in itertools.product(
        ("outputs", "inputs"), (64, 128, 192, 256, 1024, 2304), (1, 2, 3, 4, 8, 16)
    ):
        count = whole // num_ranks
        shape = (whole, 512) if split == "outputs" else (512, whole)
        each = [
            stored.dim_of(split)[1]
            for stored in stored_tensors(scheme, shape[1]).values()
            if stored.dim_of(split) is not None
        ]
        is_cut = any(count % one for one in each if one < whole)
        is_cut |= scheme.has_order and split == "inputs"
        is_cut &= count < whole
        assert bool(scheme.why_cut(split, count, whole)) == is_cut, (split, whole, num_ranks)
        refused.add(is_cut)
        if is_cut:
            with pytest.raises(ValueError, match=r"a rank|act-order"):
                StoredMatrix(scheme, shape, split, count, count, torch.device("meta"))
        else:
            StoredMatrix(scheme, shape, split, 0, count, torch.device("meta"))
    assert False in refused


@pytest.mark.parametrize("name", ["packed-32", "packed-64", "packed-int8"])
def test_tables_give_rows_and_products_in_either_form(name):
    """As embedding and LM head: kept as stored on a CPU, expanded elsewhere."""
    form = FORMATS[name]
    raw = CONFIG | {"quantization_config": form.config}
    scheme = ModelConfig.from_dict(raw).quantization.scheme
    weight = torch.randn(96, 384, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tensors, meant = form.pack(weight)
    x = torch.randn(3, 384)
    outputs = torch.tensor([0, 95, 31, 32, 17, 17])
    for method in (StoredMethod(scheme), ExpandedMethod(scheme)):
        linear = Linear(384, 96, False, torch.float32, torch.device("cpu"), method=method)
        for full_name, target in linear.targets("lm_head").items():
            stored = tensors.get(full_name.removeprefix("lm_head."))
            if stored is not None:
                target.memory.copy_(stored.reshape(target.shape))
        linear.method.finish(linear)
        is_plain = isinstance(method, ExpandedMethod)
        assert linear.weight.dtype == (torch.float32 if is_plain else torch.uint8)
        got = linear.method.rows(linear, outputs).double()
        torch.testing.assert_close(got, meant[outputs], rtol=1.2e-7, atol=0)
        want = x.double() @ meant.T
        assert float((linear(x) - want).norm() / want.norm()) < MOST_ERROR


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_can_be_expanded_to_plain_weights(name):
    form = FORMATS[name]
    raw = CONFIG | {"quantization_config": form.config}
    method = ExpandedMethod(ModelConfig.from_dict(raw).quantization.scheme)
    weight = torch.randn(192, 384, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tensors, meant = form.pack(weight)
    linear = Linear(384, 192, False, torch.float32, torch.device("cpu"), method=method)
    for full_name, target in linear.targets("x").items():
        if (stored := tensors.get(full_name.removeprefix("x."))) is not None:
            target.memory.copy_(stored.reshape(target.shape))
    method.finish(linear)
    torch.testing.assert_close(linear.weight.double(), meant, rtol=1.2e-7, atol=0)
    x = torch.randn(3, 384)
    want = x.double() @ meant.T
    assert float((linear(x) - want).norm() / want.norm()) < MOST_ERROR


def test_layers_that_are_left_out_stay_plain(plain, tmp_path):
    def keep(name):
        return ".layers.1." in name or "down_proj" in name

    ignored = {"ignore": ["lm_head", "re:.*down_proj", "model.layers.1"]}
    form = Format(FORMATS["packed-128"].config | ignored, FORMATS["packed-128"].pack)
    meant = write(plain, tmp_path, form, keep)
    with torch.inference_mode():
        want = reference(plain, meant)(torch.tensor([TOKENS])).logits[0]
    got = logits(tmp_path).double()
    assert float((got - want).norm() / want.norm()) < MOST_ERROR
    model = load_model(tmp_path, torch.float32)
    kinds = [type(layer.mlp.gate_up.method).__name__ for layer in model.decoder_layers]
    assert kinds == ["TiledMethod", "Float32CpuMethod"]


TARGETS = {
    "patterns": [["re:.*self_attn.*", r"re:model\.layers\.1\.mlp\.(gate|up)_proj$"]],
    "names": [
        [f"model.layers.{layer}.mlp.{name}_proj" for layer in (0, 1) for name in ("gate", "up")],
        ["model.layers.1.mlp.down_proj", "lm_head"],
    ],
    "a-class": [["Linear", "re:.*mlp.*"]],
    "from-the-first-letter": [["re:layers.*", "re:.*layers.1", "model.layers.0"]],
}
NAMES = [
    f"model.layers.{layer}.{part}.{name}_proj"
    for layer in (0, 1)
    for part, names in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down")))
    for name in names
]


@pytest.mark.parametrize("name", TARGETS)
def test_targets_of_one_scheme_say_which_layers_are_quantized(name, plain, tmp_path):
    wanted = [target for group in TARGETS[name] for target in group]
    chosen = [
        module
        for module in NAMES
        if "down_proj" not in module or name == "names"
        if "Linear" in wanted
        or module in wanted
        or any(re.match(one[3:], module) for one in wanted if one.startswith("re:"))
    ]
    raw = with_targets(*TARGETS[name])
    if name != "names":
        raw["ignore"] = ["re:.*down_proj", "lm_head"]
    form = Format(raw, FORMATS["packed-128"].pack)
    meant = write(plain, tmp_path, form, lambda one: one.removesuffix(".weight") not in chosen)
    with torch.inference_mode():
        want = reference(plain, meant)(torch.tensor([TOKENS])).logits[0]
    got = logits(tmp_path).double()
    assert float((got - want).norm() / want.norm()) < MOST_ERROR
    quantization = ModelConfig.from_dir(tmp_path).quantization
    assert [module for module in NAMES if not quantization.skips(module)] == chosen


def test_targets_choose_what_the_tool_itself_chooses():
    tool = pytest.importorskip("compressed_tensors.utils.match")
    for groups in TARGETS.values():
        raw = CONFIG | {"quantization_config": with_targets(*groups)}
        quantization = ModelConfig.from_dict(raw).quantization
        targets, linear = [one for group in groups for one in group], torch.nn.Linear(1, 1)
        chosen = [name for name in NAMES if tool.is_match(name, linear, targets)]
        assert [name for name in NAMES if not quantization.skips(name)] == chosen


def test_a_bias_of_old_gptq_files_must_be_zero(plain, tmp_path):
    name = "model.layers.0.self_attn.k_proj.bias"
    write(plain, tmp_path, FORMATS["gptq"], change={name: torch.zeros(64)})
    load_model(tmp_path, torch.float32)
    write(plain, tmp_path, FORMATS["gptq"], change={name: torch.ones(64)})
    with pytest.raises(CheckpointError, match="there is a bias"):
        load_model(tmp_path, torch.float32)


def test_what_a_checkpoint_lacks_or_has_in_another_type_is_named(plain, tmp_path):
    form = FORMATS["fp8-tensor"]
    scale = "model.layers.0.mlp.up_proj.weight_scale"
    write(plain, tmp_path, form, change={scale: torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"up_proj.weight_scale has shape \[3\]"):
        load_model(tmp_path)
    weight = "model.layers.0.mlp.up_proj.weight"
    write(plain, tmp_path, form, change={weight: torch.ones(256, 128)})
    with pytest.raises(
        CheckpointError, match=r"up_proj.weight has type torch.float32.*float8_e4m3fn"
    ):
        load_model(tmp_path)
    broken = torch.full((256, 128), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    write(plain, tmp_path, form, change={weight: broken})
    with pytest.raises(CheckpointError, match=r"up_proj.weight has values that are no numbers"):
        load_model(tmp_path)


def replace_matrix(directory, name, tensors):
    """Puts a matrix's tensors, by the last part of their names, in place of its others."""
    stored = load_file(directory / "model.safetensors")
    others = {key: one for key, one in stored.items() if key.rpartition(".")[0] != name}
    own = {f"{name}.{suffix}": one.contiguous() for suffix, one in tensors.items()}
    save_file(others | own, directory / "model.safetensors")


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-block", "int8", "awq", "gptq", "packed-128"])
def test_a_quantized_lm_head_is_refused_with_what_to_do(name, is_tied, plain, tmp_path):
    meant = write(plain, tmp_path, FORMATS[name])
    packed, _ = FORMATS[name].pack(meant["lm_head.weight"])
    replace_matrix(tmp_path, "lm_head", packed)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": is_tied}))
    told = r"tensor lm_head\.\w+: a quantised LM head is not read; .*`ignore`.*--quantization fp8"
    with pytest.raises(CheckpointError, match=told):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["fp8-tensor", "int8", "awq", "gptq", "packed-128"])
def test_matrices_that_are_not_as_the_configuration_says_are_told(name, plain, tmp_path):
    matrix = "model.layers.1.mlp.down_proj"
    meant = write(plain, tmp_path, FORMATS[name])
    weight = meant[f"{matrix}.weight"]
    replace_matrix(tmp_path, matrix, {"weight": weight.float()})
    told = rf"tensor {matrix}\.weight(: plain, .* quantises it| has type torch.float32, .* for)"
    with pytest.raises(CheckpointError, match=told):
        load_model(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["quantization_config"]
    others = load_file(plain / "model.safetensors")
    save_file(others, tmp_path / "model.safetensors")
    replace_matrix(tmp_path, matrix, FORMATS[name].pack(weight)[0])
    (tmp_path / "config.json").write_text(json.dumps(raw))
    told = rf"tensor {matrix}\.\w+(: quantised, and config.json says that| has type torch.\w+8)"
    with pytest.raises(CheckpointError, match=told):
        load_model(tmp_path)


def test_eight_bit_weights_without_a_quantization_config_are_not_plain_ones(plain, tmp_path):
    write(plain, tmp_path, FORMATS["fp8-tensor"])
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"float8_e4m3fn|: quantised, and config.json says"):
        load_model(tmp_path)


def test_modelopts_own_file(plain, tmp_path):
    form = FORMATS["modelopt"]
    write(plain, tmp_path, form)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    own = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    assert str(ModelConfig.from_dir(tmp_path).quantization) == "modelopt fp8 (one scale a matrix)"
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": 5}')
    with pytest.raises(CheckpointError, match="quantization must be an object"):
        ModelConfig.from_dir(tmp_path)


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
CT = FORMATS["packed-128"].config


def with_targets(*groups, **changes):
    """compressed-tensors' configuration with one group of one scheme for each list of targets."""
    [group] = CT["config_groups"].values()
    names = {f"group_{i}": group | {"targets": targets} for i, targets in enumerate(groups)}
    return CT | {"config_groups": names} | changes


# What compressed-tensors writes of rotations: those of weights are done, others are to be done.
OFFLINE = {"R1": {"type": "hadamard", "apply": [{"location": "weight_output", "targets": ["a"]}]}}
ONLINE = {"config_groups": OFFLINE | {"R3": {"apply": [{"location": "k_cache"}]}}}


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "mxfp4"}, r"\(mxfp4\) are not supported; serve"),
        ({"quant_method": "bitsandbytes"}, r"\(bitsandbytes\)"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
        ({"quant_method": "awq", "version": "gemv"}, "gemv"),
        ({"quant_method": "awq", "bits": 8}, "bits 8"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 16}, "group_size 16"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 4, "format": "marlin"}, "format 'marlin'"),
        ({"quant_method": "awq", "modules_to_not_convert": ["re:("]}, "no regular expression"),
        ({"quant_method": "gptq", "dynamic": {"-:(": {}}}, "no regular expression"),
        ({"quant_method": "modelopt", "quant_algo": ["FP8"]}, r"quant_algo \['FP8'\]"),
        (CT | {"transform_config": ONLINE}, "R3: a transform at 'k_cache' is not supported"),
        (CT | {"transform_config": {"config_groups": {"R1": 1}}}, "R1: a transform at None"),
        ({"quant_method": "gptq", "bits": 4, "lm_head": True}, "LM head"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*mlp": {"bits": 8}}}, "mixed schemes"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"\[64, 64\]"),
        (CT | {"config_groups": {"group_0": CT["config_groups"]["group_0"] | {"targets": ["Linear", "Embedding"]}}}, "LM head included"),  # noqa: E501
        (CT | {"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        (CT | {"config_groups": CT["config_groups"] | {"group_1": FORMATS["packed-32"].config["config_groups"]["group_0"]}}, "mixed schemes"),  # noqa: E501
        (with_targets(["LlamaMLP"]), r"targets \['LlamaMLP'\]: of classes only Linear and"),
        (with_targets(["Embedding", "re:.*mlp.*"]), "of classes only Linear and Embedding"),
        (with_targets(["re:("]), "no regular expression"),
        (CT | {"config_groups": with_targets(["re:.*mlp.*"])["config_groups"] | {"group_1": FORMATS["packed-32"].config["config_groups"]["group_0"]}}, "mixed schemes"),  # noqa: E501
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_name(quantization, message):
    with pytest.raises(CheckpointError, match=message) as error:
        ModelConfig.from_dict(CONFIG | {"quantization_config": quantization})
    assert "--quantization" in str(error.value)


def test_tensors_of_the_tool_itself():
    """compressed-tensors packs, and the reader sees the same numbers."""
    tool = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    numbers = torch.randint(-8, 8, (96, 384), generator=torch.Generator().manual_seed(0)).to(
        torch.int8
    )
    scheme = ModelConfig.from_dict(CONFIG | {"quantization_config": FORMATS["packed-64"].config})
    stored = StoredMatrix(scheme.quantization.scheme, (96, 384), "none", 0, 0, torch.device("cpu"))
    points = torch.randint(-8, 8, (96, 6), generator=torch.Generator().manual_seed(1)).to(
        torch.int8
    )
    stored.targets["weight_packed"].memory.copy_(tool.pack_to_int32(numbers, 4))
    stored.targets["weight_zero_point"].memory.copy_(tool.pack_to_int32(points, 4, packed_dim=0))
    stored.targets["weight_scale"].memory.fill_(1)
    matrix = stored.decode()
    assert torch.equal(matrix.numbers.int() - 8, numbers.int())
    assert torch.equal(matrix.zeros.int() - 8, points.int())


def test_memory_is_that_of_the_quantised_form(plain, tmp_path):
    write(plain, tmp_path, FORMATS["packed-128"])
    model = load_model(tmp_path, torch.float32)
    weights = load_file(plain / "model.safetensors")
    kept = sum(weight.numel() * 4 for name, weight in weights.items() if "_proj" not in name)
    packed = sum(weight.numel() for name, weight in weights.items() if "_proj" in name)
    total = sum(one.numel() * one.element_size() for one in model.parameters())
    assert kept + packed // 2 <= total <= kept + packed // 2 * 1.1
    assert kept + packed // 2 <= model.config.weight_bytes(4, True) + 8 * 1024 <= total + 16 * 1024


@pytest.mark.parametrize("name", ["fp8-block", "awq", "packed-channel", "packed-int8", "int8"])
def test_made_up_weights(name, plain, tmp_path):
    write(plain, tmp_path, FORMATS[name])
    (tmp_path / "model.safetensors").unlink()
    model = load_model(tmp_path, torch.float32, load_format="dummy")
    x = torch.randn(3, 128)
    for layer in model.decoder_layers:
        assert 0.1 < float(layer.mlp.gate_up(x).std()) < 0.4  # 0.02 * sqrt(128)


def test_transforms_of_weights_are_done_before_a_checkpoint_is_written():
    for transforms in ({}, {"config_groups": OFFLINE}):
        raw = CONFIG | {"quantization_config": CT | {"transform_config": transforms}}
        assert ModelConfig.from_dict(raw).quantization is not None
