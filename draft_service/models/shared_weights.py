"""Weights that a draft reads from its target: embedding and LM head, reduced to FR-Spec's
vocabulary on request.

On a CPU the draft's process reads the two tensors from the target's checkpoint by itself. It maps
them into memory, at no cost, where the type in the file is the type of the computation, and
converts them otherwise.
"""

import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from draft_service.models.draft_head import SharedWeights
from foredraft.errors import CheckpointError
from foredraft.layers.embedding import Embedding, LMHead
from foredraft.layers.parameters import Target
from foredraft.layers.quantized_matrix import dequantize
from foredraft.layers.stored_weights import StoredMatrix
from foredraft.layers.weight_scheme import WeightScheme
from foredraft.models import hub
from foredraft.models.config import ModelConfig
from foredraft.models.loader import fill_randomly
from foredraft.models.registry import BUNDLED
from foredraft.models.weight_files import checkpoint_files
from foredraft.models.weights import SafetensorsFile, first_line

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_shared_weights(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    on_host: bool = False,
) -> SharedWeights:
    """Loads the target's embedding and LM head.

    The embedding is unscaled: heads are trained on its plain rows.

    Args:
        directory: The target's checkpoint.
        config: Configuration of the target.
        load_format: `auto` reads them; `dummy` makes random ones.
        on_host: Whether to leave them on the host, mapped where possible (dummies: without memory),
            for a later copy to `device`.

    Raises:
        CheckpointError: They are missing or misshaped.
    """
    embedding = Embedding(0, config.hidden_size, 1.0, dtype, device)
    lm_head = LMHead(0, 0, None, config.logit_softcap, dtype, device)
    names = [EMBEDDING] if config.tie_word_embeddings else [EMBEDDING, LM_HEAD]
    shape = (config.vocab_size, config.hidden_size)
    if load_format == "dummy":
        place = torch.device("meta") if on_host else device
        found = {name: torch.empty(shape, dtype=dtype, device=place) for name in names}
    else:
        place = torch.device("cpu") if on_host else device
        schemes = {name: _scheme_of(config, name) for name in names}
        packed = {name: scheme for name, scheme in schemes.items() if scheme is not None}
        plain = [name for name in names if name not in packed]
        found = _read(directory, plain, shape, dtype, place)
        found |= _read_quantized(packed, directory, shape, dtype, place)
    embedding.weight = nn.Parameter(found[EMBEDDING], requires_grad=False)
    lm_head.weight = embedding.weight
    if not config.tie_word_embeddings:
        lm_head.weight = nn.Parameter(found[LM_HEAD], requires_grad=False)
    if load_format == "dummy" and not on_host:
        fill_randomly(nn.ModuleList([embedding, lm_head]))
    return SharedWeights(embedding, lm_head)


def reduce_vocabulary(lm_head: LMHead, token_map: torch.Tensor, dtype: torch.dtype) -> LMHead:
    """Returns the LM head of only the tokens in `token_map`, with plain weights of type `dtype`.

    The method is FR-Spec (Zhao et al. 2025, arXiv 2502.14856).
    """
    weight = lm_head.weight
    reduced = LMHead(0, 0, None, lm_head.softcap, dtype, weight.device)
    if weight.is_meta:
        rows = weight.new_empty(len(token_map), weight.shape[1])
    else:
        rows = lm_head.method.rows(lm_head, token_map.to(weight.device)).to(dtype)
    reduced.weight = nn.Parameter(rows, requires_grad=False)
    if weight.is_floating_point():
        reduced.method = lm_head.method  # the weight may still be on its way to the device
    return reduced


def read_token_map(path: str | os.PathLike[str], vocab_size: int) -> torch.Tensor:
    """Reads the target's tokens of a reduced draft vocabulary.

    Args:
        path: A .pt file that holds a list or a tensor of token ids (no code in it is run), a .json
            file with a list, a safetensors file with one tensor, the name of a bundled map, or a
            file on a hub, `organisation/name/file`.
        vocab_size: Size of the target's vocabulary.

    Returns:
        int64 [number of tokens], in the file's order.

    Raises:
        CheckpointError: The file holds something else, or cannot be fetched.
    """
    file = Path(path).expanduser()
    bundled = BUNDLED / os.fspath(path) / "token_map.safetensors"
    if not file.exists() and bundled.is_file():
        file = bundled
    elif hub.is_file(path):
        file = hub.fetch_file(os.fspath(path))
    if file.suffix == ".safetensors":
        with SafetensorsFile(file) as tensors:
            if len(tensors.entries) != 1:
                raise CheckpointError(f"{file}: {len(tensors.entries)} tensors, a token map is one")
            (entry,) = tensors.entries.values()
            if entry.dtype.is_floating_point or len(entry.shape) != 1:
                raise CheckpointError(f"{file}: {entry.name} is not a list of token ids")
            ids = torch.empty(entry.shape, dtype=torch.int64)
            tensors.copy_to(entry, Target.whole(ids))
    else:
        ids = _load_ids(file)
    if not len(ids) or ids.min() < 0 or ids.max() >= vocab_size:
        raise CheckpointError(
            f"{file}: token ids must be in [0, {vocab_size}), and there must be some"
        )
    if len(ids.unique()) != len(ids):
        raise CheckpointError(f"{file}: a token id is there twice")
    return ids


def _load_ids(file: Path) -> torch.Tensor:
    try:
        if file.suffix == ".json":
            loaded = json.loads(file.read_text())
        else:
            loaded = torch.load(file, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        # torch's own message ends in advice to run the code in the file.
        raise CheckpointError(
            f"{file}: holds more than numbers, or is neither .pt, .json nor .safetensors"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {first_line(error)}") from error
    try:
        ids = torch.as_tensor(loaded)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{file}: not a list of token ids") from error
    if ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise CheckpointError(f"{file}: not a list of token ids")
    return ids.to(torch.int64)


def _scheme_of(config: ModelConfig, name: str) -> WeightScheme | None:
    if config.quantization is None:
        return None
    return config.quantization.scheme_of(name.removesuffix(".weight"))


def _read(
    directory: Path,
    names: list[str],
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in checkpoint_files(directory):
        file = SafetensorsFile(path)
        for name in names:
            entry = file.entries.get(name)
            if entry is None:
                continue
            if entry.shape != shape or not entry.dtype.is_floating_point:
                raise CheckpointError(
                    f"{path}: tensor {name} has shape {list(entry.shape)} and type {entry.dtype}, "
                    f"config.json asks for {list(shape)}"
                )
            mapped = None
            if entry.dtype == dtype and device.type == "cpu":
                mapped = file.mapped(entry)
            if mapped is None:
                mapped = torch.empty(shape, dtype=dtype, device=device)
                file.copy_to(entry, Target.whole(mapped))
            found[name] = mapped
    missing = [name for name in names if name not in found]
    if missing:
        raise CheckpointError(f"{directory}: missing tensor {', '.join(missing)}")
    return found


def _read_quantized(
    schemes: Mapping[str, WeightScheme],
    directory: Path,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Reads as `_read`, from matrices that are quantised, whose forms are given; expanded."""
    stored = {
        name: StoredMatrix(scheme, shape, "none", 0, 0, device) for name, scheme in schemes.items()
    }
    targets = {
        f"{name.removesuffix('weight')}{suffix}": target
        for name, matrix in stored.items()
        for suffix, target in matrix.targets.items()
    }
    missing = {name for name, target in targets.items() if not target.is_optional}
    for path in checkpoint_files(directory):
        file = SafetensorsFile(path)
        for name in targets.keys() & file.entries.keys():
            entry = file.entries[name]
            if not targets[name].takes(entry.shape):
                raise CheckpointError(f"{path}: tensor {name} has shape {list(entry.shape)}")
            file.copy_to(entry, targets[name])
            missing.discard(name)
    if missing:
        raise CheckpointError(f"{directory}: missing tensor {', '.join(sorted(missing))}")
    return {
        name: dequantize(matrix.decode(), schemes[name].group_size, dtype)
        for name, matrix in stored.items()
    }
