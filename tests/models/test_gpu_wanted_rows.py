"""On a GPU too a forward that returns some rows alone has the bits of one that returns all, where
each row's bits depend on no other row.
"""

import pytest
import torch

from foredraft.attention.choice import exact_attention_for
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.config import ModelConfig
from foredraft.models.decoder import DecoderModel
from foredraft.models.loader import fill_randomly
from foredraft.runner.batch import SequenceRows
from foredraft.runner.model_runner import ModelRunner
from foredraft.trees.draft_tree import DraftTree
from verify_service.exactness import STRICT, make_exact

PAGE_SIZE = 16
# A layer of Llama-3.1-8B, twice.
LAYER = {
    "architectures": ["LlamaForCausalLM"],
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
@pytest.mark.parametrize("num_trees", [0, 1, 7])
def test_bits_are_those_of_all_rows(num_trees: int) -> None:
    device = torch.device("cuda")
    config = ModelConfig.from_dict(LAYER)
    model = DecoderModel(config, torch.bfloat16, device)
    fill_randomly(model)
    make_exact(model, STRICT)
    kv = PagedKV.for_model(config, 1024, PAGE_SIZE, torch.bfloat16, device, 0)
    runner = ModelRunner(model, kv, exact_attention_for(device))
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
        kv.data.normal_(generator=torch.Generator(device).manual_seed(1))
        output = runner.forward(rows, (0, 1), all_hidden=all_hidden)
        found.append((output.logits, output.captured[1], kv.data.clone()))
    assert len(output.hidden) == len(output.logits) == 8 * num_trees + 2
    for want, got in zip(*found, strict=True):
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))
