"""Loads a plain Llama, as `train lm` or anybody else writes it, for `training.lm.model`."""

from pathlib import Path

import torch

from foredraft.errors import CheckpointError
from training.export import load_tensors
from training.lm.model import Llama, LlamaShape, is_plain_llama


def load_model(
    path: Path | None, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> Llama:
    """Loads a Llama directory, frozen, computing in `dtype`.

    Passes over what a server does: rotary frequencies, and an LM head that is the tied embedding.

    Raises:
        CheckpointError: The directory lacks weights, or has those of another model.
    """
    if path is None or not (path / "config.json").is_file():
        raise CheckpointError(f"no config.json in {path}")
    if not is_plain_llama(path):
        raise CheckpointError(f"{path / 'config.json'}: not a plain Llama")
    model = Llama(LlamaShape.from_dir(path), dtype)
    tensors = {
        name: tensor.float()
        for name, tensor in load_tensors(path).items()
        if not name.endswith("rotary_emb.inv_freq")
    }
    if model.shape.tie_embeddings and (head := tensors.pop("lm_head.weight", None)) is not None:
        embedding = tensors.get("model.embed_tokens.weight")
        if embedding is None or not torch.equal(head, embedding):
            raise CheckpointError(
                f"{path}: lm_head.weight is not model.embed_tokens.weight, but config.json ties"
                " them: set tie_word_embeddings to false, or remove lm_head.weight"
            )
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return model.to(device).eval().requires_grad_(False)
