"""The decoder over the paged cache against transformers, in float32: the same logits however the
rows are cut.
"""

import pytest
import torch

from foredraft.attention.cpu import CpuAttention
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.loader import load_model
from foredraft.runner.batch import SequenceRows
from foredraft.runner.model_runner import ModelRunner
from foredraft.trees.draft_tree import DraftTree, paths

PAGE_SIZE, NUM_PAGES = 4, 96


def make_runner(directory):
    model = load_model(directory, torch.float32)
    kv = PagedKV.for_model(model.config, NUM_PAGES, PAGE_SIZE, torch.float32, "cpu")
    kv.data.normal_()  # what was there before must not matter
    return ModelRunner(model, kv, CpuAttention())


def tokens_of(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (length,), generator=generator).tolist()


@torch.inference_mode()
def reference(model, tokens):
    return model(torch.tensor([tokens])).logits[0].float()


def close(got, want):
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)


def test_prefill(variant):
    _, directory, model = variant
    runner, tokens = make_runner(directory), tokens_of(45)
    pages = list(range(3, 15))
    output = runner.forward([SequenceRows.chunk(pages, 0, tokens, "all")])
    want = reference(model, tokens)
    close(output.logits, want)
    assert output.logits.dtype == torch.float32
    assert torch.equal(output.logits.argmax(1), want.argmax(1))
    last = make_runner(directory).forward([SequenceRows.chunk(pages, 0, tokens, "last")])
    close(last.logits, want[-1:])
    assert last.hidden.shape == (45, 32)


def test_chunks_and_decoding_of_several_sequences(variant):
    """Chunks of one sequence run beside decoding rows of others, on scattered pages, past every
    window.
    """
    _, directory, model = variant
    runner = make_runner(directory)
    lengths = (30, 41, 23)
    tokens = [tokens_of(length, seed) for seed, length in enumerate(lengths)]
    shuffled = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(1)).tolist()
    pages = [list(range(80, 90)), shuffled[:11], shuffled[20:30]]
    pages[1:] = [[page for page in table if not 80 <= page < 90] for table in pages[1:]]
    pages[2] = [page for page in pages[2] if page not in pages[1]]
    pages[2] += [p for p in range(70, 80) if p not in pages[1] + pages[2]][: 10 - len(pages[2])]
    pages[1] += [p for p in range(60, 70) if p not in pages[1] + pages[2]][: 12 - len(pages[1])]
    want = [reference(model, row) for row in tokens]
    done = [0, 0, 0]
    sizes = [[7, 11, *[1] * 12], [1, 20, 5, 15], [13, *[1] * 10]]
    step = 0
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        rows, expected = [], []
        for index in range(3):
            size = sizes[index][step] if step < len(sizes[index]) else 0
            if size:
                chunk = tokens[index][done[index] : done[index] + size]
                rows.append(SequenceRows.chunk(pages[index], done[index], chunk, "all"))
                expected.append(want[index][done[index] : done[index] + size])
                done[index] += size
        close(runner.forward(rows).logits, torch.cat(expected))
        step += 1


def test_tree_rows_equal_their_paths(variant):
    """Each node's logits are those of a sequence that goes straight to it; the accepted path can be
    committed.
    """
    _, directory, model = variant
    runner, prefix = make_runner(directory), tokens_of(22)
    pages = [9, 2, 3, 40, 41, 42, 43, 7, 8, 20]
    runner.forward([SequenceRows.chunk(pages, 0, prefix[:-1], "none")])
    tree = DraftTree((5, 6, 7, 8, 9, 10, 11, 12), (-1, -1, 0, 1, 2, 2, 4, 1))
    output = runner.forward([SequenceRows.tree(pages, len(prefix) - 1, prefix[-1], tree)])
    node_paths = paths(tree)
    for row, path in enumerate(node_paths):
        close(output.logits[row], reference(model, [*prefix, *path])[-1])
    # rows 0, 1, 3, 5, 7 are root, 5, 7, 9, 11
    runner.commit_paths([(pages, len(prefix) - 1, [0, 1, 3, 5, 7])])
    taken = [*prefix, 5, 7, 9, 11]
    output = runner.forward([SequenceRows.chunk(pages, len(taken), [33, 34], "all")])
    close(output.logits, reference(model, [*taken, 33, 34])[-2:])


def test_chain_needs_no_mask(checkpoints):
    _, model = checkpoints("gemma3")
    runner, prefix = make_runner(checkpoints("gemma3")[0]), tokens_of(19)
    pages = list(range(20))
    runner.forward([SequenceRows.chunk(pages, 0, prefix[:-1], "none")])
    chain = DraftTree((5, 6, 7), (-1, 0, 1))
    rows = SequenceRows.tree(pages, len(prefix) - 1, prefix[-1], chain)
    assert rows.tail_mask is None
    close(runner.forward([rows]).logits, reference(model, [*prefix, 5, 6, 7])[-4:])


def test_sequences_share_prefix_pages(checkpoints):
    directory, model = checkpoints("qwen3-window")
    runner, shared = make_runner(directory), tokens_of(16)
    runner.forward([SequenceRows.chunk([5, 6, 7, 8], 0, shared, "none")])
    first, second = tokens_of(9, 1), tokens_of(7, 2)
    rows = [
        SequenceRows.chunk([5, 6, 7, 8, 20, 30, 31], 16, first, "all"),
        SequenceRows.chunk([5, 6, 7, 8, 9, 10], 16, second, "last"),
    ]
    want = [reference(model, [*shared, *first])[16:], reference(model, [*shared, *second])[-1:]]
    close(runner.forward(rows).logits, torch.cat(want))


@pytest.mark.parametrize("chunks", [(10,), (24,), (7, 17), (16, 1, 13)])
def test_dynamic_rope_follows_the_length(tmp_path, chunks):
    """A prompt beyond the trained length is stretched by all of its length, then each new token by
    its own.
    """
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.3)
    model.save_pretrained(tmp_path)
    runner, tokens, pages = make_runner(tmp_path), tokens_of(40), list(range(10))
    assert runner.model.config.max_position_embeddings == 64
    assert runner.model.config.dynamic_from == 16
    prompt, start = sum(chunks), 0
    for size in chunks:
        chunk = tokens[start : start + size]
        output = runner.forward([SequenceRows.chunk(pages, start, chunk, "last", prompt)])
        start += size
    with torch.inference_mode():
        result = model(torch.tensor([tokens[:prompt]]), use_cache=True)
        close(output.logits[0], result.logits[0, -1])
        for index in range(prompt, 40):
            step = torch.tensor([[tokens[index]]])
            result = model(step, past_key_values=result.past_key_values, use_cache=True)
            output = runner.forward([SequenceRows.chunk(pages, index, [tokens[index]])])
            close(output.logits[0], result.logits[0, -1])


def test_captured_streams(checkpoints):
    """A stream entering layer i is transformers' hidden_states[i]."""
    directory, model = checkpoints("gemma3")
    tokens = tokens_of(12)
    with torch.inference_mode():
        want = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    output = make_runner(directory).forward(
        [SequenceRows.chunk(list(range(5)), 0, tokens, "none")], capture=(2, 0, 3)
    )
    assert output.logits.shape == (0, 97)
    for got, layer in zip(output.captured, (2, 0, 3), strict=True):
        close(got, want[layer][0])
    close(output.hidden, want[-1][0])


def test_embeddings_instead_of_tokens(checkpoints):
    directory, _ = checkpoints("gemma3")
    runner, tokens = make_runner(directory), tokens_of(16)
    rows = SequenceRows.chunk(list(range(5)), 0, tokens, "all")
    with torch.inference_mode():
        embeddings = runner.model.embedding(torch.tensor(tokens))
        before = embeddings.clone()
    got = runner.forward([rows], embeddings=embeddings)
    close(got.logits, runner.forward([rows]).logits)
    assert torch.equal(embeddings, before)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_bfloat16_stays_near(checkpoints, name):
    directory, model = checkpoints(name)
    runner = load_model(directory, torch.bfloat16)
    kv = PagedKV.for_model(runner.config, NUM_PAGES, PAGE_SIZE, torch.bfloat16, "cpu")
    tokens = tokens_of(30)
    output = ModelRunner(runner, kv, CpuAttention()).forward(
        [SequenceRows.chunk(list(range(8)), 0, tokens, "all")]
    )
    want = reference(model, tokens)
    error = (output.logits - want).norm() / want.norm()
    assert error < 0.06
    assert output.logits.dtype == torch.float32
