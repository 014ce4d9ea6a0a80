"""Draft heads: each forward against the papers' equations in float64, each published layout, and all that is refused."""

import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.attention.sdpa import SdpaAttention
from foredraft.errors import CheckpointError
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.config import ModelConfig
from foredraft.models.draft_head import DraftHead
from foredraft.models.head_loader import load_head
from foredraft.models.shared_weights import (
    load_shared_weights,
    read_token_map,
    reduce_vocabulary,
)
from foredraft.runner.batch import SequenceRows
from foredraft.runner.head_runner import HeadRunner
from tests.support.checkpoints import make_checkpoint
from tests.support.draft_heads import (
    HIDDEN,
    VOCAB,
    HeadReference,
    TinyHead,
    save_head,
    tiny_head,
)

CPU = torch.device("cpu")
PAGE = 4

EAGLE31 = {"fc_norm": True, "norm_before_fc": True, "norm_output": True}
KINDS: dict[str, TinyHead] = {
    "eagle": tiny_head("EAGLE", 1),
    "eagle-unbiased": tiny_head("EAGLE", 2, fc_bias=False, bias=False),
    "eagle-qwen2": tiny_head("EAGLE", 3, architecture="Qwen2ForCausalLMEagle"),
    "eagle-two-layers": tiny_head("EAGLE", 4, num_layers=2),
    "eagle3": tiny_head("EAGLE3", 5),
    "eagle3-whole-vocabulary": tiny_head("EAGLE3", 6, draft_vocab=VOCAB),
    "eagle3-targets-head": tiny_head("EAGLE3", 7, draft_vocab=None),
    "eagle3-biased": tiny_head("EAGLE3", 8, fc_bias=True, bias=True),
    "eagle3.1": tiny_head("EAGLE3", 9, **EAGLE31),
    "eagle3-qwen3": tiny_head(
        "EAGLE3", 10, architecture="Qwen3ForCausalLMEagle3", norm_before_residual=True
    ),
    "eagle3-two-layers": tiny_head("EAGLE3", 11, num_layers=2),
    "eagle3-two-streams": tiny_head(
        "EAGLE3",
        12,
        num_aux_hidden_states=2,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1]},
    ),
    "mtp": tiny_head("MTP", 13),
    "mtp-three": tiny_head("MTP", 14, num_layers=3),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), seed=5)


@pytest.fixture(scope="module")
def tied_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tied"), "Qwen2ForCausalLM", seed=6)


def load(
    path: Path, algorithm: str, target: Path, dtype: torch.dtype = torch.float32, **options: Any
) -> DraftHead:
    config = ModelConfig.from_dir(target)
    shared = load_shared_weights(target, config, dtype, CPU)
    return load_head(path, algorithm, config, shared, dtype, CPU, **options)  # type: ignore[arg-type]


def runner_of(head: DraftHead) -> HeadRunner:
    kv = PagedKV.for_model(head.config.layer, 16, PAGE, torch.float32, CPU)
    return HeadRunner(head, kv, SdpaAttention())


def outputs(head: DraftHead, hidden: torch.Tensor, tokens: list[int]) -> tuple[Any, Any]:
    """Logits and features of one forward over all of a text."""
    rows = SequenceRows.chunk(range(8), 0, tokens, "all")
    runner = runner_of(head)
    out = runner.forward([rows], runner.fuse(hidden))
    return out.logits, out.features


def text(length: int, width: int, seed: int = 0) -> tuple[list[int], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (length,), generator=generator).tolist()
    return tokens, torch.randn(length, width, generator=generator)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_tied", [False, True])
def test_forward_equals_the_equations(
    kind: str, is_tied: bool, target: Path, tied_target: Path, tmp_path: Path
) -> None:
    tiny, model = KINDS[kind], tied_target if is_tied else target
    head = load(save_head(tiny, tmp_path), tiny.algorithm, model)
    assert head.hidden_width == tiny.width
    reference = HeadReference(tiny, model)
    tokens, hidden = text(11, tiny.width)
    # In two chunks: the second attends to what the first has written; pages are out of order.
    runner, pages = runner_of(head), [9, 2, 5, 0]
    features = runner.fuse(hidden)
    logits, following = [], []
    for start, end in ((0, 6), (6, 11)):
        rows = SequenceRows.chunk(pages, start, tokens[start:end], "all")
        out = runner.forward([rows], features[start:end])
        logits.append(out.logits)
        following.append(out.features)
    state = reference.empty
    for position in range(11):
        feature = reference.fused(hidden[position].double().numpy())
        step = reference.row(state, tokens[position], feature, position)
        state = step.state
        np.testing.assert_allclose(torch.cat(logits)[position], step.logits, atol=2e-4)
        np.testing.assert_allclose(torch.cat(following)[position], step.feature, atol=2e-4)
    columns = np.arange(len(reference.columns)) if head.token_map is None else head.token_map
    np.testing.assert_array_equal(columns, reference.columns)


def test_the_streams_are_those_that_the_layout_means(target: Path, tmp_path: Path) -> None:
    def layers(**options: Any) -> tuple[int, ...]:
        head = tiny_head("EAGLE3", 1, **options)
        return load(save_head(head, tmp_path), "EAGLE3", target).captured_layers

    assert layers() == (2, 1, 0)  # of a target of 3 layers
    ids = [0, 1, 2]
    assert layers(eagle_aux_hidden_state_layer_ids=ids) == (1, 2, 3)
    assert layers(eagle_config={"eagle_aux_hidden_state_layer_ids": ids}) == (1, 2, 3)
    with pytest.raises(CheckpointError, match=r"eagle_aux_hidden_state_layer_ids.*3 layers"):
        layers(eagle_aux_hidden_state_layer_ids=[0, 1, 3])
    with pytest.raises(CheckpointError, match="num_aux_hidden_states is 4"):
        layers(num_aux_hidden_states=4)


def renamed(head: TinyHead, *pairs: tuple[str, str]) -> TinyHead:
    tensors = {}
    for name, tensor in head.tensors.items():
        for old, new in pairs:
            if name.startswith(old):
                name = new + name.removeprefix(old)
        tensors[name] = tensor
    return TinyHead(head.algorithm, head.config, tensors, head.num_streams)


def speculators(head: TinyHead, **options: Any) -> TinyHead:
    """The same head as the speculators library writes it."""
    layer = {**head.config, "model_type": "llama"}
    vocab = layer.pop("draft_vocab_size", None)
    del layer["architectures"]
    kind = head.algorithm.lower()
    config = {
        "architectures": ["Eagle3Speculator" if kind == "eagle3" else "EagleSpeculator"],
        "speculators_model_type": kind,
        "transformer_layer_config": layer,
        "draft_vocab_size": vocab,
        **options,
    }
    return TinyHead(head.algorithm, config, head.tensors, head.num_streams)


EAGLE, EAGLE3, MTP = KINDS["eagle"], KINDS["eagle3"], KINDS["mtp"]
LEGACY = tuple((f"fc_norm.{i}.", f"aux_norm_{n}.") for i, n in enumerate(("low", "mid", "high")))
LAYOUTS: dict[str, tuple[TinyHead, TinyHead, str]] = {
    "eagle-model-prefix": (EAGLE, renamed(EAGLE, ("", "model.")), "model.safetensors"),
    "eagle-bin": (EAGLE, EAGLE, "pytorch_model.bin"),
    "eagle-plain-architecture": (
        EAGLE,
        TinyHead("EAGLE", {**EAGLE.config, "architectures": ["LlamaForCausalLM"]}, EAGLE.tensors),
        "model.safetensors",
    ),
    "eagle-speculators": (
        EAGLE,
        speculators(
            renamed(EAGLE, ("layers.0.", "transformer."), ("fc.", "fusion_fc.")), fusion_bias=True
        ),
        "model.safetensors",
    ),
    "eagle3-layers-0": (EAGLE3, renamed(EAGLE3, ("midlayer.", "layers.0.")), "model.safetensors"),
    "eagle3-model-prefix": (
        EAGLE3,
        renamed(EAGLE3, ("midlayer.", "model.midlayer."), ("fc.", "model.fc.")),
        "pytorch_model.bin",
    ),
    "eagle3-speculators": (
        EAGLE3,
        speculators(
            renamed(EAGLE3, ("midlayer.", "layers.0.")),
            eagle_aux_hidden_state_layer_ids=[2, 1, 0],
            norm_before_residual=False,
        ),
        "model.safetensors",
    ),
    "eagle3-speculators-two-layers": (
        KINDS["eagle3-two-layers"],
        speculators(
            renamed(
                KINDS["eagle3-two-layers"],
                ("midlayer.", "layers.0."),
                ("layers.1.hidden_norm", "layers.1.input_layernorm"),
            )
        ),
        "model.safetensors",
    ),
    "eagle3-depth-of-the-target": (
        EAGLE3,
        TinyHead("EAGLE3", {**EAGLE3.config, "num_hidden_layers": 3}, EAGLE3.tensors, 3),
        "pytorch_model.bin",
    ),
    "eagle3-legacy-norms": (
        KINDS["eagle3.1"],
        renamed(KINDS["eagle3.1"], *LEGACY),
        "model.safetensors",
    ),
    "mtp-without-prefix": (MTP, renamed(MTP, ("model.", "")), "pytorch_model.bin"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_head(layout: str, target: Path, tmp_path: Path) -> None:
    plain, other, file = LAYOUTS[layout]
    tokens, hidden = text(9, plain.width)
    heads = [
        load(save_head(plain, tmp_path / "plain"), plain.algorithm, target),
        load(save_head(other, tmp_path / "other", file=file), plain.algorithm, target),
    ]
    assert heads[0].captured_layers == heads[1].captured_layers
    for first, second in zip(*(outputs(head, hidden, tokens) for head in heads), strict=True):
        assert torch.equal(first, second)


def test_a_head_in_several_files(target: Path, tmp_path: Path) -> None:
    tokens, hidden = text(5, EAGLE3.width)
    expected = outputs(load(save_head(EAGLE3, tmp_path / "one"), "EAGLE3", target), hidden, tokens)
    names = list(EAGLE3.tensors)
    for kind, extension in (("safetensors", "safetensors"), ("bin", "bin")):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(EAGLE3.config))
        weight_map = {}
        for i in range(2):
            part = {name: EAGLE3.tensors[name].contiguous() for name in names[i::2]}
            file = f"part-{i}.{extension}"
            save: Callable[..., None] = save_file if kind == "safetensors" else torch.save
            save(part, folder / file)
            weight_map |= dict.fromkeys(part, file)
        stem = "model.safetensors" if kind == "safetensors" else "pytorch_model.bin"
        (folder / f"{stem}.index.json").write_text(json.dumps({"weight_map": weight_map}))
        found = outputs(load(folder, "EAGLE3", target), hidden, tokens)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_mtp_layers_in_the_targets_checkpoint(tied_target: Path, tmp_path: Path) -> None:
    tiny = KINDS["mtp-three"]
    config = json.loads((tied_target / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 3}
    sizes = {key: tiny.config[key] for key in ("head_dim", "intermediate_size", "rms_norm_eps")}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    tensors = load_file(tied_target / "model.safetensors") | tiny.tensors
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "model.safetensors")
    tokens, hidden = text(7, HIDDEN)
    apart = load(save_head(tiny, tmp_path / "head"), "MTP", tied_target)
    inside = load(tmp_path, "MTP", tmp_path)
    assert apart.num_modules == inside.num_modules == 1
    for a, b in zip(outputs(apart, hidden, tokens), outputs(inside, hidden, tokens), strict=True):
        assert torch.equal(a, b)
    assert load(tmp_path, "MTP", tmp_path, multi_layer=True).num_modules == 3


def test_an_embedding_of_its_own_is_used_and_a_copy_is_not_kept(
    target: Path, tmp_path: Path
) -> None:
    shared = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    tokens, hidden = text(6, EAGLE3.width)
    for name, table in (("copy", shared), ("own", shared + 1)):
        tensors = EAGLE3.tensors | {"embed_tokens.weight": table}
        tiny = TinyHead("EAGLE3", EAGLE3.config, tensors, 3)
        head = load(save_head(tiny, tmp_path / name), "EAGLE3", target)
        reference = HeadReference(tiny, target)
        feature = reference.fused(hidden[0].double().numpy())
        step = reference.row(reference.empty, tokens[0], feature, 0)
        np.testing.assert_allclose(outputs(head, hidden, tokens)[0][0], step.logits, atol=2e-4)
    config = ModelConfig.from_dir(target)
    weights = load_shared_weights(target, config, torch.float32, CPU)
    head = load_head(tmp_path / "copy", "EAGLE3", config, weights, torch.float32, CPU)
    assert head.embedding is weights.embedding
    head = load_head(tmp_path / "own", "EAGLE3", config, weights, torch.float32, CPU)
    assert head.embedding is not weights.embedding


def test_a_copy_of_the_targets_lm_head_is_passed_over(target: Path, tmp_path: Path) -> None:
    tensors = EAGLE.tensors | {
        "lm_head.weight": torch.zeros(VOCAB, HIDDEN),
        "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6),
    }
    tiny = TinyHead("EAGLE", EAGLE.config, tensors)
    head = load(save_head(tiny, tmp_path), "EAGLE", target)
    assert head.lm_head.weight.abs().sum() > 0


def test_shared_weights_of_the_files_type_are_mapped(target: Path) -> None:
    config = ModelConfig.from_dir(target)
    stored = load_file(target / "model.safetensors")
    mapped = load_shared_weights(target, config, torch.float32, CPU)
    converted = load_shared_weights(target, config, torch.bfloat16, CPU)
    for name, module in (
        ("model.embed_tokens.weight", "embedding"),
        ("lm_head.weight", "lm_head"),
    ):
        assert torch.equal(getattr(mapped, module).weight, stored[name])
        assert torch.equal(getattr(converted, module).weight, stored[name].bfloat16())
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert any(line.endswith(str(target / "model.safetensors")) for line in lines)


def without(head: TinyHead, *names: str) -> TinyHead:
    kept = {name: t for name, t in head.tensors.items() if name not in names}
    return TinyHead(head.algorithm, head.config, kept, head.num_streams)


def with_(head: TinyHead, config: dict[str, Any] | None = None, **tensors: Any) -> TinyHead:
    added = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return TinyHead(
        head.algorithm, head.config | (config or {}), head.tensors | added, head.num_streams
    )


OFFSETS = EAGLE3.tensors["d2t"]
WRONG: dict[str, tuple[TinyHead, str]] = {
    "missing": (without(EAGLE, "layers.0.mlp.up_proj.weight"), r"missing tensor layers\.0\.mlp\.up_proj"),
    "missing-bias": (with_(without(EAGLE, "fc.bias"), {"bias": True}), r"missing tensor fc\.bias"),
    "unexpected-bias": (with_(EAGLE, {"bias": False}), r"unexpected tensor fc\.bias"),
    "unexpected": (with_(EAGLE, layers__0__input_layernorm__weight=torch.ones(HIDDEN)),
        r"unexpected tensor layers\.0\.input_layernorm\.weight"),
    "second-layer": (with_(EAGLE, layers__1__mlp__up_proj__weight=torch.ones(1)), r"unexpected tensor layers\.1"),
    "nan": (with_(EAGLE, fc__bias=torch.full((HIDDEN,), math.nan)), r"fc\.bias has values that are infinite or no num"),
    "shape": (with_(EAGLE, fc__weight=torch.ones(HIDDEN, HIDDEN)), r"fc\.weight has shape \[48, 48\].*\[48, 96\]"),
    "integers": (with_(EAGLE, fc__weight=torch.ones(HIDDEN, 2 * HIDDEN, dtype=torch.int64)), r"fc\.weight has type"),
    "twice": (with_(EAGLE, model__fc__weight=torch.ones(HIDDEN, 2 * HIDDEN)), r"fc\.weight.* are the same"),
    "no-d2t": (without(EAGLE3, "d2t", "t2d"), "missing tensor d2t"),
    "no-lm-head": (without(EAGLE3, "lm_head.weight"), r"missing tensor lm_head\.weight"),
    "no-norm": (without(EAGLE3, "norm.weight"), r"missing tensor norm\.weight"),
    "short-d2t": (with_(EAGLE3, d2t=OFFSETS[:-1]), r"d2t has shape \[79\]"),
    "d2t-outside": (with_(EAGLE3, d2t=OFFSETS + VOCAB), "d2t does not map 80 rows"),
    "d2t-twice": (with_(EAGLE3, d2t=-torch.arange(80)), "d2t does not map 80 rows"),
    "depth": (with_(EAGLE3, {"num_hidden_layers": 2}), r"missing tensor layers\.1"),
    "t2d": (with_(EAGLE3, t2d=torch.ones(VOCAB, dtype=torch.bool)), "d2t and t2d contradict"),
    "hidden-size": (with_(EAGLE, {"hidden_size": 96}), "hidden_size: the head's is 96, the target's 48"),
    "target-hidden-size": (with_(EAGLE3, {"target_hidden_size": 64}), "target_hidden_size: the head's is 64"),
    "vocabulary": (with_(EAGLE, {"vocab_size": 100}), "vocab_size: the head's is 100, the target's 128"),
    "norms": (with_(EAGLE, {"layernorms": True}), "layernorms"),
    "activation": (with_(EAGLE, {"hidden_act": "relu"}), "activation 'relu'"),
    "embedding": (with_(EAGLE, embed_tokens__weight=torch.ones(9, HIDDEN)), r"embed_tokens\.weight has shape \[9"),
    "no-mtp-norm": (without(MTP, "model.mtp_layers.0.final_layernorm.weight"), "missing tensor mtp_layers"),
    "mtp-second": (with_(MTP, {"num_nextn_predict_layers": 2}), r"missing tensor mtp_layers\.1\.final_layernorm"),
    "mtp-unknown": (with_(MTP, model__mtp_layers__1__x=torch.ones(1)), r"unexpected tensor model\.mtp_layers\.1\.x"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_exactly_is_named(wrong: str, target: Path, tmp_path: Path) -> None:
    tiny, message = WRONG[wrong]
    with pytest.raises(CheckpointError, match=message):
        load(save_head(tiny, tmp_path), tiny.algorithm, target)


@pytest.mark.parametrize(
    ("head", "algorithm", "message"),
    [
        (EAGLE, "EAGLE3", "a head for --speculative-algorithm EAGLE, not EAGLE3"),
        (EAGLE3, "EAGLE", "a head for --speculative-algorithm EAGLE3, not EAGLE"),
        (with_(EAGLE3, {"architectures": ["LlamaForCausalLM"]}), "EAGLE", "EAGLE3, not EAGLE"),
        (MTP, "EAGLE", "a head for --speculative-algorithm MTP, not EAGLE"),
        (with_(MTP, {"architectures": ["GPT2LMHeadModel"]}), "MTP", "'GPT2LMHeadModel' is not a"),
        (speculators(EAGLE3, speculators_model_type="dflash"), "EAGLE3", "'dflash'"),
    ],
)
def test_another_kind_of_head_is_refused(
    head: TinyHead, algorithm: str, message: str, target: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(save_head(head, tmp_path), algorithm, target)


def test_no_weights_no_head(target: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EAGLE.config))
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        load(tmp_path, "EAGLE", target)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        load(tmp_path, "EAGLE", target)


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("code has run",))


@pytest.mark.parametrize("content", ["code", "list", "nothing"])
def test_a_pickle_runs_no_code(
    content: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_head(EAGLE, tmp_path, file="pytorch_model.bin")
    file = tmp_path / "pytorch_model.bin"
    if content == "code":
        file.write_bytes(pickle.dumps({"fc.weight": Evil()}, protocol=2))
    elif content == "list":
        torch.save([1, 2], file)
    else:
        file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        load(tmp_path, "EAGLE", target)
    assert "code has run" not in capsys.readouterr().out


def test_dummy_heads_need_no_weights_and_leave_the_targets_alone(
    target: Path, tmp_path: Path
) -> None:
    stored = load_file(target / "model.safetensors")
    for kind, tiny in KINDS.items():
        (tmp_path / "config.json").write_text(json.dumps(tiny.config))
        head = load(tmp_path, tiny.algorithm, target, load_format="dummy")
        tokens, hidden = text(5, tiny.width)
        assert torch.isfinite(outputs(head, hidden, tokens)[0]).all(), kind
        assert torch.equal(head.embedding.weight, stored["model.embed_tokens.weight"])


def test_a_reduced_vocabulary(target: Path, tmp_path: Path) -> None:
    config = ModelConfig.from_dir(target)
    shared = load_shared_weights(target, config, torch.float32, CPU)
    ids = [5, 0, 127, 64]
    torch.save(ids, tmp_path / "map.pt")
    save_file({"token_map": torch.tensor(ids)}, tmp_path / "map.safetensors")
    for name in ("map.pt", "map.safetensors"):
        assert read_token_map(tmp_path / name, VOCAB).tolist() == ids
    whole = shared.lm_head
    reduced = reduce_vocabulary(whole, torch.tensor(ids))
    x = torch.randn(3, HIDDEN)
    torch.testing.assert_close(reduced(x), whole(x)[:, ids])
    bundled = read_token_map("foredraft-demo-token-map", 8192)
    assert len(bundled) == len(bundled.unique()) > 1000


@pytest.mark.parametrize(
    "content", [[], [1, 1], [128], [-1], [1.5], "text", {"a": 1}, [[1, 2]], Evil()]
)
def test_a_broken_token_map_is_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "map.pt")
    with pytest.raises(CheckpointError, match=r"map\.pt") as refused:
        read_token_map(tmp_path / "map.pt", VOCAB)
    assert "weights_only" not in str(refused.value)
    with pytest.raises(CheckpointError, match="nowhere"):
        read_token_map(tmp_path / "nowhere", VOCAB)


def test_an_eagle_head_is_not_a_whole_model(target: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing tensor .*fc\.weight.*unexpected tensor"):
        load(target, "EAGLE", target)
