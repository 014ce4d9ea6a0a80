"""Says where a head was made for another quantisation of its target than the one served."""

import re
from pathlib import Path

from foredraft.errors import ForedraftError
from foredraft.models.config import ModelConfig
from foredraft.models.quantization_config import Quantization

# Words in the names of published checkpoints, those that tell the most first.
_WORDS = {
    "fp8": {"fp8", "float8"},
    "fp4": {"fp4", "nvfp4", "mxfp4"},
    "int8": {"int8", "w8a8", "w8a16", "8bit", "q8"},
    "int4": {"int4", "w4a16", "w4a8", "4bit", "q4", "awq", "gptq"},
}


def quantization_note(trained_for: str, model_path: str, quantization: Quantization | None) -> str:
    """Returns a sentence where a head was made for another quantisation of the target; empty where
    it was not, or where its files name no target.

    Args:
        trained_for: Target that the head was made for, by name or path, as its files name it.
        model_path: Target that is served, as it was given.
        quantization: Quantisation of the target that is served; None for plain weights.
    """
    is_on_load = quantization is not None and quantization.is_on_load
    if not trained_for or (trained_for == model_path and not is_on_load):
        return ""
    theirs, ours = _kind(trained_for), quantization.kind if quantization is not None else "plain"
    if theirs == ours:
        return ""
    return (
        f"made for {trained_for} with {theirs} weights, by its name or files; this target's are"
        f" {ours}: that may cost acceptance, never text"
    )


def _kind(model: str) -> str:
    """Returns `plain`, `fp8`, `fp4`, `int8` or `int4`, by a directory's config.json, else by words
    of the name.
    """
    if (Path(model) / "config.json").is_file():
        try:
            found = ModelConfig.from_dir(model).quantization
        except ForedraftError:  # a model that this server does not read
            pass
        else:
            return "plain" if found is None else found.kind
    words = set(re.split(r"[^a-z0-9]+", Path(model).name.lower()))
    return next((kind for kind, known in _WORDS.items() if words & known), "plain")
