"""Masks and pruned trees of a grammar, against the language written out string by string."""

import functools
import itertools
import random

import llguidance
import numpy as np
import pytest
import torch

from foredraft.models.registry import resolve_model_path
from foredraft.text.tokenizer import Tokenizer
from foredraft.trees.draft_tree import DraftTree, paths
from foredraft.types import GrammarKind
from testing import tiny_tokenizers
from verify_service.grammar import masks as masks_module
from verify_service.grammar import matcher as matcher_module
from verify_service.grammar.masks import allow_only
from verify_service.grammar.matcher import CompiledGrammar, GrammarState
from verify_service.grammar.source import to_llguidance
from verify_service.grammar.vocabulary import LIMITS, load_vocabulary

VOCAB_SIZE = 640  # more than the tokenizer has, as padded vocabularies do
EOS = 1
REGEX = "(the|The) (dog|quick fox|häuser){1,2}|[0-9]{1,3}|你好|b"
LANGUAGE = {
    *(
        f"{the} {''.join(names)}".encode()
        for the in ("the", "The")
        for count in (1, 2)
        for names in itertools.product(("dog", "quick fox", "häuser"), repeat=count)
    ),
    *(str(n).zfill(width).encode() for width in (1, 2, 3) for n in range(10**width)),
    "你好".encode(),
    b"b",
}
PREFIXES = {text[:end] for text in LANGUAGE for end in range(len(text) + 1)}


@pytest.fixture(scope="module", params=sorted(tiny_tokenizers.FAMILIES))
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp(request.param)
    tiny_tokenizers.save(tiny_tokenizers.FAMILIES[request.param](), folder)
    tokenizer = Tokenizer.from_dir(folder)
    eos = tokenizer.encode("</s>", False)[0]
    size = max(VOCAB_SIZE, tokenizer.vocab_size + 40)
    return tokenizer, load_vocabulary(folder, size, frozenset({eos})), size, eos


def compiled(vocabulary: llguidance.LLTokenizer, text: str) -> CompiledGrammar:
    grammar = to_llguidance(GrammarKind.REGEX, text)
    matcher = llguidance.LLMatcher(vocabulary, grammar, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    return CompiledGrammar(matcher, vocabulary.vocab_size)


def allowed_tokens(state: GrammarState, tree: DraftTree, size: int) -> list[set[int]]:
    masks = np.empty((1 + len(tree), state.num_words), np.int32)
    state.fill(tree, masks)
    logits = torch.zeros(len(masks), size)
    allow_only(logits, range(len(masks)), torch.from_numpy(masks))
    return [set(torch.isfinite(row).nonzero().flatten().tolist()) for row in logits]


def texts(tokenizer: Tokenizer, size: int) -> list[bytes]:
    """Returns what each token adds to a text; nothing for tokens that no text has."""
    return [
        b""
        if token in tokenizer.special_ids or tokenizer.token(token) is None
        else tokenizer.token_bytes(token)
        for token in range(size)
    ]


def random_tree(rng: random.Random, size: int, likely: list[int], num_nodes: int) -> DraftTree:
    tokens, parents = [], []
    for node in range(num_nodes):
        tokens.append(rng.choice(likely) if rng.random() < 0.85 else rng.randrange(size))
        parents.append(rng.randrange(-1, node))
    return DraftTree(tuple(tokens), tuple(parents))


@pytest.mark.parametrize("seed", range(4))
def test_masks_and_pruning_are_those_of_the_language(vocabulary, seed: int) -> None:
    tokenizer, lltokenizer, size, eos = vocabulary
    added = texts(tokenizer, size)
    likely = [t for t, text in enumerate(added) if text and any(text in p for p in PREFIXES)]
    likely.append(eos)
    rng = random.Random(seed)
    state = compiled(lltokenizer, REGEX).follow()
    output: list[int] = []
    state.resume(output)
    done = b""
    while True:
        tree = random_tree(rng, size, likely, 24)
        state._row_seconds = 0.0  # however slow the machine is: no smaller trees here
        pruned = state.prune(tree)
        expected_nodes = {
            tuple(path)
            for path in paths(tree)[1:]
            if all(
                (done + b"".join(added[t] for t in path[: i + 1])) in PREFIXES and added[t]
                if t != eos
                else i == len(path) - 1 and done + b"".join(added[u] for u in path[:i]) in LANGUAGE
                for i, t in enumerate(path)
            )
            # Where nothing can follow, the text ends without an end token.
            and not any(
                is_final(done + b"".join(added[u] for u in path[:i])) for i in range(1, len(path))
            )
        }
        assert {tuple(path) for path in paths(pruned)[1:]} == expected_nodes
        for path, allowed in zip(paths(pruned), allowed_tokens(state, pruned, size), strict=True):
            text = done + b"".join(added[t] for t in path if t != eos)
            if (path and path[-1] == eos) or (path and is_final(text)):
                continue  # nothing is chosen there
            expected = {t for t in range(size) if added[t] and text + added[t] in PREFIXES}
            assert allowed == expected | ({eos} if text in LANGUAGE else set()), text
        chosen = rng.choice(sorted(allowed_tokens(state, DraftTree(), size)[0]))
        num_taken, has_ended = state.advance([chosen])
        output.append(chosen)
        done += b"" if chosen == eos else added[chosen]
        assert has_ended == (chosen == eos or is_final(done))
        assert num_taken == 1
        if has_ended:
            assert done in LANGUAGE
            return
        if rng.random() < 0.3:  # as preemption does
            state.release()
        state.resume(output)


def is_final(text: bytes) -> bool:
    return text in LANGUAGE and not any(p.startswith(text) and p != text for p in PREFIXES)


def test_a_model_without_an_end_token_still_ends(tmp_path) -> None:
    tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    vocabulary = load_vocabulary(tmp_path, 608, frozenset())
    state = compiled(vocabulary, "[ab]{2}").follow()
    state.resume([])
    a = tokenizer.encode("a", False)[0]
    assert state.advance([a]) == (1, False)
    assert {tokenizer.decode([t]) for t in allowed_tokens(state, DraftTree(), 608)[0]} == {"a", "b"}
    assert state.advance([a, a]) == (1, True)


def test_a_grammar_that_takes_too_much_to_follow_says_so(tmp_path) -> None:
    tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path)
    vocabulary = load_vocabulary(tmp_path, 600, frozenset({EOS}))
    grammar = to_llguidance(GrammarKind.REGEX, r"(.*a.{30}){3}b")
    limits = llguidance.LLParserLimits(step_lexer_fuel=2000, max_lexer_states=300)
    matcher = llguidance.LLMatcher(vocabulary, grammar, limits=limits, log_level=0)
    assert not matcher.is_error()
    state = CompiledGrammar(matcher, 600).follow()
    state.resume([])
    a = Tokenizer.from_dir(tmp_path).encode("a", False)[0]
    for _ in range(200):
        allowed_tokens(state, DraftTree((a, a), (-1, 0)), 600)
        if state.failure is not None or state.advance([a])[0] == 0:
            break
    assert state.failure is not None
    assert "too much" in state.failure
    assert state.prune(DraftTree((a,), (-1,))) == DraftTree()
    assert allowed_tokens(state, DraftTree(), 600) == [set(range(600))]


def test_a_text_that_no_token_goes_on_with_says_so(tmp_path) -> None:
    """The vocabulary has no tilde and no bytes to spell one: the text is stuck, not slow."""
    tiny_tokenizers.save(tiny_tokenizers.metaspace(), tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert "~" not in tokenizer.decode(tokenizer.encode("a~b"))
    vocabulary = load_vocabulary(tmp_path, tokenizer.vocab_size, frozenset({EOS}))
    state = compiled(vocabulary, "(dog|a~b)").follow()
    state.resume([])
    [a] = [t for t in range(tokenizer.vocab_size) if tokenizer.token(t) == "a"]
    assert a in allowed_tokens(state, DraftTree(), tokenizer.vocab_size)[0]
    assert state.advance([a]) == (1, False)
    allowed_tokens(state, DraftTree(), tokenizer.vocab_size)
    assert state.failure is not None
    assert "no token" in state.failure
    assert "too much" not in state.failure


def test_masks_made_side_by_side_are_the_same(vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    _, tokens, size, _ = vocabulary
    grammar = compiled(tokens, REGEX)
    states: list[GrammarState] = []
    while len(states) < 20:
        state, has_ended = grammar.follow(), False
        state.resume([])
        for _ in range(random.randrange(3)):
            allowed = sorted(allowed_tokens(state, DraftTree(), size)[0])
            _, has_ended = state.advance([random.choice(allowed)])
            if has_ended:
                break
        if not has_ended:
            states.append(state)
    masks = np.zeros((2, len(states), states[0].num_words), np.int32)
    for threads, block in zip((1, 3), masks, strict=True):
        monkeypatch.setattr(masks_module, "NUM_THREADS", threads)
        masks_module.side_by_side(
            [
                functools.partial(state.fill, DraftTree(), block[i : i + 1])
                for i, state in enumerate(states)
            ]
        )
    assert masks[0].any()
    assert np.array_equal(*masks)
    assert not any(state.failure for state in states)


def test_a_grammar_that_is_slow_to_follow_gets_smaller_trees(
    vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, words, size, _ = vocabulary
    state = compiled(words, "[0-9]{1,30}").follow()
    state.resume([])
    assert state.max_nodes == matcher_module.MAX_NODES
    digit = tokenizer.encode("7", False)[-1]
    chain = DraftTree((digit,) * 6, tuple(range(-1, 5)))
    clock = iter((0.0, 0.0007 * 7))  # a seventh of it for each of the rows
    monkeypatch.setattr(matcher_module.time, "thread_time", lambda: next(clock))
    allowed_tokens(state, chain, size)
    assert state.max_nodes == int(matcher_module.STEP_SECONDS / 0.0007) - 1 == 6
    clock = iter((0.0, 0.002))
    allowed_tokens(state, DraftTree(), size)
    assert state.max_nodes == 1
    assert len(state.prune(chain)) <= 1
    # Faster steps are believed slowly.
    clock = iter((0.0, 0.0))
    allowed_tokens(state, DraftTree(), size)
    assert state.max_nodes == int(matcher_module.STEP_SECONDS / 0.0018) - 1
    clock = iter((0.0, 1.0))
    allowed_tokens(state, DraftTree(), size)
    assert state.max_nodes == 0
    assert state.prune(chain) == DraftTree()


@pytest.fixture(scope="module")
def bundled():
    """Returns the bundled model's tokenizer, whose tokens have several characters, and a grammar of
    JSON objects over it.
    """
    folder = resolve_model_path("foredraft-demo")
    tokenizer = Tokenizer.from_dir(folder)
    vocabulary = load_vocabulary(folder, tokenizer.vocab_size, frozenset({0}))
    source = to_llguidance(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
    matcher = llguidance.LLMatcher(vocabulary, source, limits=LIMITS)
    return tokenizer, CompiledGrammar(matcher, tokenizer.vocab_size)


BEGUN, TAKEN, LEFT = '{"p": {"', 'parameters": {"', 'description" : "'


def test_a_drafted_text_that_was_not_taken_leaves_nothing_behind(bundled) -> None:
    tokenizer, grammar = bundled
    begun, taken, left = (tokenizer.encode(text, False) for text in (BEGUN, TAKEN, LEFT))
    state, fresh = grammar.follow(), grammar.follow()
    state.resume(begun)
    fresh.resume(begun + taken)
    chain = DraftTree(tuple(left), tuple(range(-1, len(left) - 1)))
    allowed_tokens(state, chain, tokenizer.vocab_size)
    assert state.advance(taken) == (len(taken), False)
    after = [allowed_tokens(one, DraftTree(), tokenizer.vocab_size) for one in (state, fresh)]
    assert after[0] == after[1]


def test_branches_of_a_tree_leave_nothing_behind_for_each_other(bundled) -> None:
    tokenizer, grammar = bundled
    begun, *branches = (tokenizer.encode(text, False) for text in (BEGUN, LEFT, TAKEN))
    tokens, parents = [], []
    for branch in branches:
        parents += [-1, *range(len(tokens), len(tokens) + len(branch) - 1)]
        tokens += branch
    tree = DraftTree(tuple(tokens), tuple(parents))
    state = grammar.follow()
    state.resume(begun)
    found = allowed_tokens(state, tree, tokenizer.vocab_size)
    for row, path in zip(found, paths(tree), strict=True):
        fresh = grammar.follow()
        fresh.resume([*begun, *path])
        assert [row] == allowed_tokens(fresh, DraftTree(), tokenizer.vocab_size)
