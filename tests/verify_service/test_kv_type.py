"""Types of the cache, and refusals by name."""

import json
from types import SimpleNamespace

import pytest
import torch

from foredraft.config.services import VerifyConfig
from foredraft.errors import ConfigError
from verify_service.kv_type import check_kv_flags, kv_scales, kv_type

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("name", "weights", "want"),
    [
        ("auto", torch.float16, torch.float16),
        ("auto", torch.float32, torch.float32),
        ("bfloat16", torch.float32, torch.bfloat16),
        ("fp8_e4m3", torch.float16, torch.float8_e4m3fn),
        ("fp8_e5m2", torch.bfloat16, torch.float8_e5m2),
    ],
)
def test_types(name, weights, want):
    config = VerifyConfig(kv_cache_dtype=name)
    check_kv_flags(config, CPU)
    assert kv_type(config, weights) == want


def test_what_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="--kv-cache-dtype bfloat16 does not go with float16"):
        kv_type(VerifyConfig(kv_cache_dtype="bfloat16"), torch.float16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ConfigError, match=r"fp8_e4m3: A100 is sm_80.*fp8_e5m2 works there"):
        check_kv_flags(VerifyConfig(kv_cache_dtype="fp8_e4m3"), GPU)
    check_kv_flags(VerifyConfig(kv_cache_dtype="fp8_e5m2"), GPU)
    for name in ("auto", "bfloat16"):
        config = VerifyConfig(kv_cache_dtype=name, quantization_param_path="scales.json")
        with pytest.raises(
            ConfigError, match=f"--quantization-param-path has no use with --kv-cache-dtype {name}"
        ):
            check_kv_flags(config, CPU)


def test_scales_come_from_the_checkpoint_or_a_file(tmp_path):
    model = SimpleNamespace(
        kv_scales=torch.tensor([[0.5, 2.0]]), config=SimpleNamespace(num_layers=1)
    )
    file = tmp_path / "scales.json"
    file.write_text(json.dumps({"kv_cache": {"scaling_factor": {"0": {"0": 0.25}}}}))
    assert kv_scales(VerifyConfig(), model, torch.bfloat16) is None
    eight_bit = torch.float8_e4m3fn
    assert kv_scales(VerifyConfig(), model, eight_bit) == [(0.5, 2.0)]
    config = VerifyConfig(quantization_param_path=str(file))
    assert kv_scales(config, model, eight_bit) == [(0.25, 0.25)]
