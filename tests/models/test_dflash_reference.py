"""DFlash against transformers' own: hidden states, logits and proposals over several rounds, on a
target whose hidden states our decoder captures itself, so that a layer id that is off by one fails.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator
from transformers.models.muse_glimmer_assistant.configuration_muse_glimmer_assistant import (
    MuseGlimmerAssistantConfig,
)
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import (
    MuseGlimmerAssistantModel,
)

from draft_service.drafters.chains import rows_behind
from draft_service.drafters.paged_sequences import PagedSequence
from draft_service.models.block_draft import BlockDraft
from draft_service.steps.block_runner import BlockRunner
from foredraft.attention.cpu import CpuAttention
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.loader import load_model
from foredraft.runner.batch import SequenceRows
from foredraft.runner.model_runner import ModelRunner
from foredraft.types import SamplingParams
from testing.checkpoints import make_checkpoint
from testing.loaded_heads import CPU, load

PAGE, NUM_PAGES, VOCAB, MASK = 4, 24, 128, 126


@dataclass(frozen=True)
class Shape:
    """Shape of a drafter: its layers, and the target's layers, 0-based, whose output it reads."""

    num_layers: int
    ids: list[int]
    block: int
    window: int | None = None
    heads: int = 4
    head_dim: int = 12

    @property
    def layer_types(self) -> list[str]:
        if self.window is None:
            return ["full_attention"] * self.num_layers
        return ["sliding_attention", "full_attention"] * (self.num_layers // 2)


SHAPES = {
    "two-layers": Shape(2, [0, 1], 5),
    "one-layer-many-heads": Shape(1, [1], 8, heads=6, head_dim=8),
    "sliding": Shape(4, [0, 1, 2, 3], 4, window=9),
}
LAYOUTS = ("zlab", "speculators")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), seed=5, num_hidden_layers=6)


def reference_of(shape: Shape, seed: int) -> MuseGlimmerAssistantModel:
    """A random drafter of transformers'."""
    config = MuseGlimmerAssistantConfig(
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=2,
        head_dim=shape.head_dim,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        # A distance equal to its window is still seen there.
        sliding_window=(shape.window or 100) - 1,
        layer_types=shape.layer_types,
        block_size=shape.block,
        mask_token_id=MASK,
        target_layer_ids=shape.ids,
        attn_implementation="eager",
    )
    torch.manual_seed(seed)
    model = MuseGlimmerAssistantModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0, 0.2)
            else:
                parameter.normal_(0.0, 1.5 / parameter.shape[1] ** 0.5)
            assert name
    return model


def saved(model: MuseGlimmerAssistantModel, shape: Shape, layout: str, folder: Path) -> Path:
    """The drafter's weights in a published layout."""
    renamed = {
        name.replace("encoder.output_norm_enc", "hidden_norm").replace("encoder.", ""): tensor
        for name, tensor in model.state_dict().items()
    }
    config = model.config
    layer: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": 2,
        "head_dim": shape.head_dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "layer_types": shape.layer_types,
        "sliding_window": shape.window,
    }
    if layout == "zlab":
        raw = {
            **layer,
            "architectures": ["DFlashDraftModel"],
            "block_size": shape.block,
            "num_target_layers": 6,
            "dflash_config": {"target_layer_ids": shape.ids, "mask_token_id": MASK},
        }
    else:
        raw = {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "transformer_layer_config": {**layer, "model_type": "qwen3"},
            "block_size": shape.block,
            "mask_token_id": MASK,
            "aux_hidden_state_layer_ids": [layer + 1 for layer in shape.ids],
            "sliding_window_non_causal": True,
            "target_hidden_size": config.hidden_size,
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({n: t.contiguous() for n, t in renamed.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", SHAPES)
@torch.no_grad()
def test_rounds_are_those_of_transformers(
    kind: str, layout: str, target: Path, tmp_path: Path
) -> None:
    shape = SHAPES[kind]
    theirs = reference_of(shape, seed=len(kind))
    draft = load(saved(theirs, shape, layout, tmp_path), "DFLASH", target)
    assert isinstance(draft, BlockDraft)
    main = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager").eval()
    generator = DFlashTokenCandidateGenerator(
        theirs,
        main.get_input_embeddings(),
        main.get_output_embeddings(),
        GenerationConfig(max_length=200),
    )
    ours = load_model(target, dtype=torch.float32, device=CPU)
    kv = PagedKV.for_model(draft.config.layer, NUM_PAGES, PAGE, torch.float32, CPU)
    runner = BlockRunner(draft, kv, CpuAttention())
    pages, scratch = [7, 2, 11, 0, 5, 9, 3, 8, 14, 1], [20, 21]
    tokens = torch.randint(2, 120, (1, 34), generator=torch.Generator().manual_seed(3))
    done = 0
    for length in (12, 16, 17, 25, 31):  # of what the target has computed; one more token is known
        ids = tokens[:, : length + 1]
        hidden = main(ids[:, :length], output_hidden_states=True).hidden_states
        new = tuple(states[:, done:] for states in hidden)
        candidates, logits = generator.get_candidates(
            ids,
            {"position_ids": torch.arange(length + 1)[None], "attention_mask": None},
            type("Outputs", (), {"hidden_states": new}),
            False,
            length - done - 1,
        )
        target_kv = PagedKV.for_model(ours.config, NUM_PAGES, PAGE, torch.float32, CPU)
        out = ModelRunner(ours, target_kv, CpuAttention()).forward(
            [SequenceRows.chunk(range(10), 0, ids[0, :length].tolist())], draft.captured_layers
        )
        assert out.streams is not None
        rows = SequenceRows.chunk(pages, done, ids[0, done:length].tolist())
        runner.extend([rows], runner.fuse(out.streams[done:]))
        sequence = PagedSequence(0, SamplingParams(), 0, length + 1, length, pages=pages)
        block = [int(ids[0, -1]), *[MASK] * (shape.block - 1)]
        states = runner.propose([rows_behind(sequence, block, scratch, PAGE, False)], None)
        given = draft.lm_head(states[1:])
        torch.testing.assert_close(given, logits[0], atol=2e-4, rtol=1e-4)
        assert given.argmax(-1).tolist() == candidates[0, length + 1 :].tolist()
        done = length
