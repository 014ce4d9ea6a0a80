"""`train lm` end to end on the CPU: the loss falls, a resumed run is the same run, the export is a
transformers model.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from foredraft.errors import CheckpointError, ConfigError
from training.export import save_array
from training.lm.loading import load_model
from training.lm.model import Llama, LlamaShape
from training.lm.optimizer import cosine_schedule, orthogonalize
from training.lm.trainer import LMTrainer, LMTrainingConfig
from training.text_data import END_OF_TEXT, read_documents
from training.text_marks import TextMarks, read_marks

SHAPE = LlamaShape(
    vocab_size=400,
    hidden_size=48,
    num_layers=2,
    num_heads=3,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=96,
    context_length=64,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train").mkdir()
    (folder / "heldout").mkdir()
    for index in range(40):
        names = [f"value_{(index * 7 + k) % 23}" for k in range(12)]
        code = "".join(f"def get_{n}(self):\n    return self.{n}\n\n\n" for n in names)
        split = "heldout" if index % 10 == 0 else "train"
        (folder / split / f"file_{index}.py").write_text(code)
    return folder


def config_for(corpus: Path, out: Path, **changes: object) -> LMTrainingConfig:
    config = LMTrainingConfig(
        data=(corpus / "train",),
        validation=(corpus / "heldout",),
        out=out,
        shape=SHAPE,
        steps=60,
        warmup=6,
        batch=4,
        micro_batch=2,
        lr=1e-2,
        compile=False,
        seed=3,
    )
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("trained")
    result = LMTrainer(config_for(corpus, out)).run()
    assert result.finished
    return out


def test_the_loss_falls_far_below_that_of_a_uniform_guess(trained: Path) -> None:
    log = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert losses[-1] < losses[0] - 1
    assert losses[-1] < 2.5
    # Without a limit on minutes the text holds no constant that is not JSON.
    report = json.loads((trained / "training.json").read_text(), parse_constant=pytest.fail)
    assert report["heldout"]["py"]["bits_per_byte"] < 2
    assert (trained / "curves.png").stat().st_size < 200_000


def test_the_export_is_a_transformers_model_with_the_same_logits(trained: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained)
    tokens = torch.tensor([tokenizer.encode("def get_value_3(self):\n    return")])
    assert tokens[0, 0] == tokenizer.bos_token_id == 0
    ours = load_model(trained, "cpu")
    hidden, _ = ours(tokens)
    expected = theirs(tokens).logits
    torch.testing.assert_close(ours.logits(hidden), expected, atol=1e-5, rtol=1e-5)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == f"{END_OF_TEXT}User: hi\nAssistant:"


def test_a_resumed_run_ends_with_the_same_weights_bit_for_bit(corpus: Path, tmp_path: Path) -> None:
    whole = LMTrainer(config_for(corpus, tmp_path / "whole", steps=12))
    whole.run()
    first = LMTrainer(config_for(corpus, tmp_path / "parts", steps=12))
    for _ in range(5):
        first._train_step()
    first._save_checkpoint()
    second = LMTrainer(config_for(corpus, tmp_path / "parts", steps=12, resume=True))
    assert second.step == 5
    second.run()
    for (name, ours), theirs in zip(
        second.model.state_dict().items(), whole.model.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_a_time_limit_leaves_a_checkpoint_to_resume_from(corpus: Path, tmp_path: Path) -> None:
    result = LMTrainer(config_for(corpus, tmp_path, max_minutes=0.0)).run()
    assert not result.finished
    assert result.loss is None, "NaN is no JSON"
    once = config_for(corpus, tmp_path, steps=1, resume=True, checkpoint_every=1)
    resumed = LMTrainer(once).run()
    assert resumed.finished
    assert resumed.loss is not None
    again = LMTrainer(once).run()
    assert (again.finished, again.loss) == (True, resumed.loss)


def test_a_checkpoint_of_another_shape_is_refused(corpus: Path, tmp_path: Path) -> None:
    LMTrainer(config_for(corpus, tmp_path, max_minutes=0.0)).run()
    other = dataclasses.replace(SHAPE, num_layers=1)
    with pytest.raises(CheckpointError, match="other sizes"):
        LMTrainer(config_for(corpus, tmp_path, shape=other, resume=True))


def test_a_student_learns_from_a_teacher(corpus: Path, trained: Path, tmp_path: Path) -> None:
    small = dataclasses.replace(SHAPE, num_layers=1, hidden_size=32)
    config = config_for(corpus, tmp_path, shape=small, steps=40, tokenizer=trained, teacher=trained)
    trainer = LMTrainer(config)
    windows = trainer.sampler.batch_at(0)
    before = float(trainer._micro_loss(windows)[0].detach())
    trainer.run()
    assert float(trainer._micro_loss(windows)[0].detach()) < before - 1


def test_a_tokenizer_of_another_family_keeps_its_roles(corpus: Path, tmp_path: Path) -> None:
    vocabulary = {"value": 0, "<s>": 1, "</s>": 2, "return": 90}  # ids may have gaps
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="value"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    source, out = tmp_path / "given", tmp_path / "out"
    source.mkdir()
    tokenizer.save(str(source / "tokenizer.json"))
    roles = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ 'hi' }}"}
    (source / "tokenizer_config.json").write_text(json.dumps(roles))
    trainer = LMTrainer(config_for(corpus, out, tokenizer=source, steps=1))
    words = [text.text.split() for text in read_documents([corpus / "train"])]
    tokens = trainer.sampler.tokens.tolist()
    assert len(tokens) == sum(len(text) + 2 for text in words)
    assert (tokens[0], tokens[-1]) == (1, 2)
    assert tokens.count(1) == tokens.count(2) == len(words)
    trainer.run()
    assert json.loads((out / "tokenizer_config.json").read_text()) == roles
    for name in ("config.json", "generation_config.json"):
        told = json.loads((out / name).read_text())
        assert (told["bos_token_id"], told["eos_token_id"]) == (1, 2)
    (source / "tokenizer_config.json").unlink()
    assert read_marks(tokenizer, source / "tokenizer.json") == TextMarks(1, 1)
    tokenizer.post_processor = TemplateProcessing(single="$A")
    with pytest.raises(ConfigError, match="no token begins its texts"):
        read_marks(tokenizer, source)


def test_a_teacher_of_other_sizes_is_refused(corpus: Path, trained: Path, tmp_path: Path) -> None:
    long = dataclasses.replace(SHAPE, context_length=65)
    changes = {"tokenizer": trained, "teacher": trained}
    with pytest.raises(ConfigError, match="--context: 65 tokens are more than the teacher's 64"):
        LMTrainer(config_for(corpus, tmp_path, shape=long, **changes))
    other = dataclasses.replace(SHAPE, vocab_size=260)
    message = r"--teacher has \d+ tokens in its vocabulary, the tokenizer 260; give its folder"
    with pytest.raises(ConfigError, match=message):
        LMTrainer(config_for(corpus, tmp_path, shape=other, teacher=trained))


def test_sampled_windows_cover_an_epoch_and_do_not_depend_on_history(
    corpus: Path, tmp_path: Path
) -> None:
    sampler = LMTrainer(config_for(corpus, tmp_path)).sampler
    late = sampler.batch_at(9)
    assert torch.equal(sampler.batch_at(9), late)
    sampler.batch_at(100)
    assert torch.equal(sampler.batch_at(9), late)
    starts = {int(sampler._start(window)) for window in range(sampler.windows)}
    assert len(starts) == sampler.windows
    assert all(
        b - a == SHAPE.context_length
        for a, b in zip(sorted(starts), sorted(starts)[1:], strict=False)
    )


def test_a_new_run_in_an_old_folder_takes_over_nothing(corpus: Path, tmp_path: Path) -> None:
    first = LMTrainer(config_for(corpus, tmp_path, steps=20, validation=()))
    first.run()
    (tmp_path / "more.py").write_text("def put(value):\n    self.value = value\n" * 400)
    other = dataclasses.replace(SHAPE, vocab_size=300)
    again = LMTrainer(config_for(corpus, tmp_path, shape=other, data=(tmp_path / "more.py",)))
    assert again.shape.vocab_size < first.shape.vocab_size
    assert again.num_tokens != first.num_tokens
    assert (tmp_path / "log.jsonl").read_text() == ""
    again._save_checkpoint()
    LMTrainer(config_for(corpus, tmp_path))
    assert not list(tmp_path.glob("checkpoint*")), "--resume would go on from another run"
    given = LMTrainer(config_for(corpus, tmp_path, shape=other, tokenizer=tmp_path))
    assert given.shape.vocab_size == first.shape.vocab_size, "a tokenizer that was asked for stays"


def test_lines_of_text_may_hold_any_character_and_wrong_ones_are_named(tmp_path: Path) -> None:
    file = tmp_path / "talk.jsonl"
    texts = ["one\u2028two\x85three", "four"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in (*texts, " ")]
    file.write_text("\n".join([*lines, "", ""]), encoding="utf-8")
    assert [document.text for document in read_documents([file])] == texts
    for wrong in ("{", '{"body": "x"}', '{"text": 3}', "[]"):
        file.write_text(f"{lines[0]}\n{wrong}\n", encoding="utf-8")
        with pytest.raises(ConfigError, match=r"talk\.jsonl, line 2: not an object with a text"):
            list(read_documents([file]))


def test_an_array_is_there_whole_or_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokens.npy"
    save_array(path, np.arange(5))

    def fail(file: Path, array: np.ndarray) -> None:
        Path(file).write_bytes(b"part of it")
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "save", fail)
    with pytest.raises(OSError, match="no space"):
        save_array(path, np.arange(9))
    assert np.load(path).tolist() == [0, 1, 2, 3, 4]


def test_text_and_domains_that_are_not_there_are_configuration_errors(
    corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="--data: there is no text"):
        LMTrainer(config_for(corpus, tmp_path / "a", data=(tmp_path / "empty",)))
    with pytest.raises(ConfigError, match="--repeat docs: the text has py"):
        LMTrainer(config_for(corpus, tmp_path / "b", repeats={"docs": 2, "py": 1}))
    with pytest.raises(ConfigError, match="--data: there is no text"):
        LMTrainer(config_for(corpus, tmp_path / "c", repeats={"py": 0}))


def test_missing_text_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        LMTrainer(config_for(tmp_path / "nowhere", tmp_path / "out"))


def test_newton_schulz_brings_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for rows, cols in ((24, 60), (60, 24)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(3, rows, cols)).float())
        assert values.min() > 0.4
        assert values.max() < 1.4


def test_the_schedule_warms_up_and_ends_near_nothing() -> None:
    rates = [cosine_schedule(step, 100, 10, 1.0) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0)
    assert rates[-1] < 0.03


def test_captured_streams_are_those_that_enter_the_layers() -> None:
    model = Llama(SHAPE)
    model.initialize(0)
    tokens = torch.randint(0, 400, (2, 9))
    hidden, (first, last) = model(tokens, capture=(0, 2))
    torch.testing.assert_close(first, model.model.embed_tokens(tokens))
    torch.testing.assert_close(model.model.norm(last), hidden)
