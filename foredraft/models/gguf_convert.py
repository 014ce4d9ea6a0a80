"""Turns a GGUF file into a Hugging Face directory: `python -m foredraft.models.gguf_convert SOURCE TARGET`.

Runs as a process of its own, started by `registry`, so that the memory that transformers takes is given back.
"""

import sys
from pathlib import Path

from foredraft.errors import CheckpointError


def convert(source: Path, target: Path) -> None:
    """Writes config, tokenizer and bfloat16 weights of `source` to the directory `target`.

    Raises:
        CheckpointError: transformers cannot read the file.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        # Packed GGUF weights cannot be saved again; dequantized ones can.
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
    except (ImportError, OSError, ValueError, KeyError, NotImplementedError) as error:
        raise CheckpointError(f"{source}: transformers cannot read it: {error}") from error
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> int:
    """Prints one line to standard error and returns 1 when the file cannot be converted."""
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
