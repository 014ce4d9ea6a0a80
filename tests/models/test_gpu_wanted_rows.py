"""On a GPU too a forward that returns some rows alone has the bits of one that returns all, where
each row's bits depend on no other row, and else their values.
"""

import json
from pathlib import Path

import pytest
import torch

from foredraft.attention.choice import exact_attention_for, target_attention_for
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.loader import load_model
from foredraft.runner.batch import SequenceRows
from foredraft.runner.model_runner import ModelRunner
from foredraft.trees.draft_tree import DraftTree
from verify_service.exactness import OFF, STRICT, make_exact

PAGE_SIZE = 16
# A layer of Llama-3.1-8B, twice.
LAYER = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    ("num_trees", "exactness", "quantization", "kv_dtype"),
    [
        (0, STRICT, "unquant", torch.bfloat16),
        (1, STRICT, "unquant", torch.bfloat16),
        (7, STRICT, "unquant", torch.bfloat16),
        (8, STRICT, "unquant", torch.bfloat16),  # 66 rows with logits, which are filled up
        (100, STRICT, "unquant", torch.bfloat16),
        (7, STRICT, "fp8", torch.bfloat16),
        (40, STRICT, "fp8", torch.bfloat16),
        (7, STRICT, "int4", torch.bfloat16),
        (40, STRICT, "int4", torch.bfloat16),
        (40, STRICT, "unquant", torch.float8_e4m3fn),
        (7, OFF, "unquant", torch.bfloat16),
        (40, OFF, "unquant", torch.bfloat16),
    ],
)
def test_rows_are_those_of_a_forward_of_all(
    tmp_path: Path, num_trees: int, exactness: str, quantization: str, kv_dtype: torch.dtype
) -> None:
    device = torch.device("cuda")
    (tmp_path / "config.json").write_text(json.dumps(LAYER))
    model = load_model(
        tmp_path, torch.bfloat16, device, load_format="dummy", quantization=quantization
    )
    make_exact(model, exactness)
    kv = PagedKV.for_model(model.config, 1024, PAGE_SIZE, kv_dtype, device, 0)
    choose = exact_attention_for if exactness == STRICT else target_attention_for
    runner = ModelRunner(model, kv, choose(device))
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, 1024, (count,), generator=generator).tolist()

    tree = DraftTree(tuple(tokens(7)), (-1, -1, -1, 0, 0, 1, 3))
    pages = [list(range(first, first + 20)) for first in range(500, 500 + 2 * num_trees, 2)]
    rows = [SequenceRows.tree(own, 250, 5, tree) for own in pages]
    rows += [
        SequenceRows.chunk(list(range(200)), 1100, tokens(1500), "last"),
        SequenceRows.chunk(list(range(200, 340)), 0, tokens(2000), "none"),
        SequenceRows.chunk(list(range(340, 360)), 17, tokens(300), "last"),
    ]
    found = []
    for all_hidden in (True, False):
        numbers = torch.empty(kv.data.shape, dtype=torch.bfloat16, device=device)
        kv.data.copy_(numbers.normal_(generator=torch.Generator(device).manual_seed(1)))
        output = runner.forward(rows, (0, 1), all_hidden=all_hidden)
        found.append((output.logits, output.captured[1], kv.data.clone()))
    assert len(output.hidden) == len(output.logits) == 8 * num_trees + 2
    for want, got in zip(*found, strict=True):
        if exactness == STRICT:
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
        else:
            difference = (got.float() - want.float()).norm()
            assert difference < 0.02 * want.float().norm()
