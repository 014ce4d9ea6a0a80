"""Tiny tokenizers of the families that models use, trained on a few sentences."""

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.processors import TemplateProcessing

TEXTS = (
    "The quick brown fox jumps over the lazy dog. The dog sleeps.",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n",
    "Ein Haus, zwei Häuser; naïve café. 1234567890 2+2=4",
    "你好、世界。こんにちは 🙂🙃 Привет, мир",
)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


def byte_level(vocab_size: int = 600) -> Tokenizer:
    """Creates GPT-2's kind: BPE over bytes (Llama 3, Qwen)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return _with_bos(tokenizer)


def byte_fallback(strip: bool, vocab_size: int = 700) -> Tokenizer:
    """Creates SentencePiece's kind with byte tokens:

    Llama 2 (leading space stripped) or Gemma (not).
    """
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 256,
        special_tokens=["<unk>", *SPECIAL],
        show_progress=False,
        limit_alphabet=60,
    )
    trained.train_from_iterator(TEXTS, trainer)
    model = json.loads(trained.to_str())["model"]
    vocabulary: dict[str, int] = model["vocab"]
    for byte in range(256):
        vocabulary.setdefault(f"<0x{byte:02X}>", len(vocabulary))
    merges = [tuple(merge) for merge in model["merges"]]
    bpe = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    replace = normalizers.Replace(" ", "▁")
    if strip:
        parts.append(decoders.Strip(" ", 1, 0))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(parts)
    return _with_bos(tokenizer)


def metaspace(vocab_size: int = 400) -> Tokenizer:
    """Creates SentencePiece's kind without byte tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<unk>", *SPECIAL], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return _with_bos(tokenizer)


FAMILIES = {
    "byte_level": byte_level,
    "llama_2": lambda: byte_fallback(strip=True),
    "gemma": lambda: byte_fallback(strip=False),
    "metaspace": metaspace,
}


def save(tokenizer: Tokenizer, folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Writes the files of a Hugging Face directory."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _with_bos(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer
