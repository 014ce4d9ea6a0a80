"""A forward without repeats launches every variant of a kernel that a whole one does, by fewer
layers, and changes no later forward.
"""

from collections.abc import Hashable
from pathlib import Path

import pytest
import torch

from foredraft.attention.cpu import CpuAttention
from foredraft.attention.exact_triton import ExactAttention
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.architectures import model_class
from foredraft.models.config import ModelConfig
from foredraft.models.decoder import DecoderModel
from foredraft.models.loader import load_model
from foredraft.runner.batch import SequenceRows
from foredraft.runner.model_runner import ModelRunner
from testing.checkpoints import make_checkpoint
from testing.kernel_variants import META, as_on_gpu, recorded_launches

PAGE = 16


def ran_by(model: DecoderModel) -> list[int]:
    """Returns the indexes of the layers that forwards run from now on."""
    ran: list[int] = []
    for index, layer in enumerate(model.decoder_layers):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    return ran


def chunk(num_rows: int) -> list[SequenceRows]:
    return [SequenceRows.chunk(list(range(8)), 0, list(range(3, 3 + num_rows)), "all")]


@pytest.mark.parametrize(
    ("architecture", "capture", "layers"),
    [
        ("LlamaForCausalLM", (), [0]),
        ("LlamaForCausalLM", (0, 2, 3), [0, 1]),
        ("Gemma3ForCausalLM", (), [0, 5]),  # sliding windows but for the last layer
        ("Gemma3ForCausalLM", (2, 4, 6), [0, 1, 5]),
    ],
)
@pytest.mark.parametrize("num_rows", [1, 5, 100])
def test_all_variants_are_launched(
    tmp_path: Path, architecture: str, capture: tuple[int, ...], layers: list[int], num_rows: int
) -> None:
    config = ModelConfig.from_dir(make_checkpoint(tmp_path, architecture))
    model = model_class(architecture)(config, torch.bfloat16, META)
    as_on_gpu(model)
    kv = PagedKV.for_model(config, 8, PAGE, torch.bfloat16, META)
    runner, ran = ModelRunner(model, kv, ExactAttention()), ran_by(model)
    with recorded_launches() as met:
        with runner.without_repeats():
            runner.forward(chunk(num_rows), capture)
        few: set[Hashable] = set(met)
        assert ran == layers
        ran.clear()
        runner.forward(chunk(num_rows), capture)
        assert met == few
    assert ran == list(range(config.num_layers))


def test_later_forwards_are_whole(tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path), torch.float32)
    kv = PagedKV.for_model(model.config, 8, PAGE, torch.float32, "cpu")
    runner = ModelRunner(model, kv, CpuAttention())
    want = runner.forward(chunk(5), (1, 3))
    with runner.without_repeats():
        few = runner.forward(chunk(5))
    assert not torch.equal(few.hidden, want.hidden)
    got = runner.forward(chunk(5), (1, 3))
    assert torch.equal(got.logits, want.logits)
    assert got.streams is not None
    assert want.streams is not None
    assert torch.equal(got.streams, want.streams)
