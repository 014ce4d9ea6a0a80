"""Loads a model from a Hugging Face directory, and refuses anything that does not fit exactly."""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from foredraft.errors import CheckpointError
from foredraft.layers.linear import Linear
from foredraft.layers.parameters import Target
from foredraft.models.architectures import model_class
from foredraft.models.config import ModelConfig
from foredraft.models.decoder import DecoderModel
from foredraft.models.kv_scales import check_scales, scale_targets
from foredraft.models.quantization_config import VOCABULARY, on_load
from foredraft.models.weight_files import checkpoint_files
from foredraft.models.weights import (
    SafetensorsFile,
    TensorEntry,
    check_finite,
    open_checkpoint,
)
from foredraft.parallel.group import SINGLE, Group

DUMMY_SEED = 0
DUMMY_STD = 0.02
CONTROL_GROUP = Path("/sys/fs/cgroup")
# Last parts of the names of tensors that quantised matrices alone have.
_OF_QUANTIZED = frozenset(
    (
        "qweight",
        "qzeros",
        "scales",
        "g_idx",
        "input_scale",
        "input_zero_point",
        "weight_packed",
        "weight_scale",
        "weight_scale_inv",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
    )
)


def load_model(
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    group: Group = SINGLE,
    quantization: str = "unquant",
    quantization_group_size: int | None = None,
) -> DecoderModel:
    """Loads a decoder.

    Args:
        path: A directory with config.json and safetensors, see `registry.resolve_model_path`.
        dtype: Type of the weights in memory; the checkpoint's when None.
        device: Device of the weights.
        load_format: `auto` reads weights; `dummy` makes random ones from config.json alone.
        group: Ranks that share the model; each reads its part of the weights.
        quantization: Form that a plain checkpoint's linear layers are quantised to during loading:
            `fp8`, `int8` or `int4`; `unquant` leaves them.
        quantization_group_size: Number of inputs that share a scale in `int4`; 128 when None.

    Raises:
        CheckpointError: Something is missing, broken, unknown, or too large for the memory.
    """
    directory, device = Path(path), torch.device(device)
    config = ModelConfig.from_dir(directory)
    if quantization != "unquant":
        own = on_load(config.quantization, quantization, quantization_group_size, directory)
        config = dataclasses.replace(config, quantization=own)
    if dtype is None:
        dtype = getattr(torch, config.dtype, None)
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise CheckpointError(f"{directory}: dtype {config.dtype} is not supported")
    if load_format != "dummy":
        checkpoint_files(directory)  # raises for missing files before memory is allocated
    _check_memory(config, dtype, device, directory, group)
    model = model_class(config.architecture)(config, dtype, device, group)
    if load_format == "dummy":
        fill_randomly(model)
        return model
    scales = scale_targets(model.kv_scales)
    try:
        targets = model.targets()
    except ValueError as error:
        raise CheckpointError(f"{directory}: {error}") from error
    copy_checkpoint(directory, targets, model.ignored_tensors(), scales)
    del targets
    finish_linears(model, directory)
    check_scales(model.kv_scales, str(directory))
    embedding = model.embedding
    if config.tie_word_embeddings and embedding.table is None:
        _check_tied_head(directory, embedding.share.target(embedding.weight))
    model.finish_loading()
    return model


@torch.no_grad()
def finish_linears(model: torch.nn.Module, directory: Path) -> None:
    """Converts quantised weights to the form that is computed with, layer after layer.

    Args:
        model: Model or draft head whose tensors are loaded.
        directory: The checkpoint, for errors.

    Raises:
        CheckpointError: Tensors of a matrix contradict each other.
    """
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            try:
                module.method.finish(module)
            except ValueError as error:
                raise CheckpointError(f"{directory}: {name}: {error}") from error


@torch.no_grad()
def copy_checkpoint(
    directory: Path,
    targets: Mapping[str, Target],
    ignored: Sequence[str] = (),
    scalars: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Fills memory from a checkpoint.

    Every target needs exactly one tensor of its shape, and no tensor may be left over.

    Args:
        targets: Targets by tensor name.
        ignored: Prefixes of names that are known and not loaded.
        scalars: Memory of one or more numbers that a single optional number fills, by tensor name.

    Raises:
        CheckpointError: Tensors are missing, unexpected, misshaped or not finite; they are named.
    """
    total = sum(target.memory.numel() for target in targets.values())
    filled: set[str] = set()
    with tqdm(
        total=total,
        unit=" weights",
        unit_scale=True,
        desc="loading",
        disable=not sys.stderr.isatty(),
        leave=False,
    ) as bar:
        for file in open_checkpoint(directory):
            for name, entry in file.entries.items():
                target = _target_of(name, entry, file, targets, ignored, scalars or {})
                if target is None:
                    continue
                if name in filled:
                    raise CheckpointError(f"{file.path}: tensor {name} is there twice")
                file.copy_to(entry, target)
                check_finite(target.memory, name, file.path)
                filled.add(name)
                bar.update(target.memory.numel())
                if target.on_filled is not None:
                    target.on_filled()
    missing = [
        name for name, target in targets.items() if name not in filled and not target.is_optional
    ]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(f"{directory}: missing tensor {', '.join(missing[:3])}{more}")


def _target_of(
    name: str,
    entry: TensorEntry,
    file: SafetensorsFile,
    targets: Mapping[str, Target],
    ignored: Sequence[str],
    scalars: Mapping[str, torch.Tensor],
) -> Target | None:
    """Returns the memory that a stored tensor is to fill; None where it needs none.

    Fills a scalar at once. See `copy_checkpoint` for the arguments.
    """
    target = targets.get(name)
    _check_form(file, name, entry, targets)
    if target is None and name in scalars:
        scalar = scalars[name]
        if entry.shape in ((), (1,)):
            number = scalar.new_empty(entry.shape)
            file.copy_to(entry, Target.whole(number))
            scalar.fill_(number.item())
            return None
        target = Target.whole(scalar)
    if target is None:
        # Old checkpoints carry the rotary frequencies, which follow from the configuration.
        if name.endswith("rotary_emb.inv_freq") or name.startswith(tuple(ignored)):
            return None
        raise CheckpointError(f"{file.path}: unexpected tensor {name} {list(entry.shape)}")
    check_fits(file.path, name, entry, target)
    return target


def _check_form(
    file: SafetensorsFile, name: str, entry: TensorEntry, targets: Mapping[str, Target]
) -> None:
    """Raises CheckpointError for a tensor of a quantised matrix where a plain one is read, and the
    other way round.
    """
    matrix, _, suffix = name.rpartition(".")
    where, plain = f"{file.path}: tensor {name}", targets.get(f"{matrix}.weight")
    is_quantized = name not in targets and suffix in _OF_QUANTIZED
    if matrix in VOCABULARY and suffix == "weight" and entry.dtype.itemsize == 1:
        is_quantized = plain is None or plain.memory.dtype.itemsize > 1
    if is_quantized and matrix in VOCABULARY:
        kind = "LM head" if matrix == "lm_head" else "embedding"
        raise CheckpointError(
            f"{where}: a quantised {kind} is not read; serve a checkpoint made with {matrix} in"
            " `ignore` or `modules_to_not_convert`, or the plain one with --quantization fp8, int8"
            " or int4"
        )
    if is_quantized and plain is not None and plain.memory.dtype.itemsize > 1:
        raise CheckpointError(f"{where}: quantised, and config.json says that {matrix} is plain")
    others = (f"{matrix}.{other}" for other in _OF_QUANTIZED)
    if suffix == "weight" and plain is None and any(other in targets for other in others):
        raise CheckpointError(
            f"{where}: plain, and quantization_config in config.json quantises it"
        )


def check_fits(
    where: Path, name: str, entry: TensorEntry, target: Target, asks: str = "config.json asks"
) -> None:
    """Raises CheckpointError if a stored tensor does not have its target's shape and type.

    Args:
        where: File or directory of the tensor.
        asks: Who asks for the shape, and the verb.
    """
    if not target.takes(entry.shape):
        raise CheckpointError(
            f"{where}: tensor {name} has shape {list(entry.shape)}, {asks} for {list(target.shape)}"
        )
    if not may_fill(entry.dtype, target.memory.dtype):
        raise CheckpointError(
            f"{where}: tensor {name} has type {entry.dtype}, config.json asks for"
            f" {target.memory.dtype}"
        )


def may_fill(stored: torch.dtype, kept: torch.dtype) -> bool:
    """Returns whether numbers of one type may be stored as another: floats of 16 bits or more
    as each other, others only as themselves.
    """
    if kept.is_floating_point and kept.itemsize > 1:
        return stored.is_floating_point and stored.itemsize > 1
    return stored == kept


def _check_tied_head(directory: Path, embedding: Target) -> None:
    """Raises CheckpointError where a checkpoint with a tied head has an LM head that differs
    from the embedding.
    """
    for file in open_checkpoint(directory):
        entry = file.entries.get("lm_head.weight")
        if entry is not None and not file.equals(entry, embedding):
            raise CheckpointError(
                f"{file.path}: lm_head.weight is not model.embed_tokens.weight, but config.json"
                " ties them: set tie_word_embeddings to false, or remove lm_head.weight"
            )


def fill_randomly(model: torch.nn.Module) -> None:
    """Fills all parameters of a model; see `fill_tensors_randomly`."""
    fill_tensors_randomly(dict(model.named_parameters()))
    for module in model.modules():
        if isinstance(module, Linear):
            module.method.fill_randomly(module, DUMMY_STD)


@torch.no_grad()
def fill_tensors_randomly(tensors: Mapping[str, torch.Tensor]) -> None:
    """Fills tensors with normal weights for matrices, ones for norms, zeros for biases.

    A device gives the same numbers in every run.
    """
    device = next(iter(tensors.values())).device
    generator = torch.Generator(device).manual_seed(DUMMY_SEED)
    for name, tensor in tensors.items():
        if tensor.dim() > 1:
            tensor.normal_(0.0, DUMMY_STD, generator=generator)
        else:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)


def _check_memory(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, directory: Path, group: Group
) -> None:
    """Raises CheckpointError when the weights do not fit, before the kernel kills the process."""
    needed = config.weight_bytes(dtype.itemsize, device.type == "cpu") // group.size
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[0]
    else:
        available = available_host_bytes()
    if needed > available:
        raise CheckpointError(
            f"{directory}: too little memory: weights in"
            f" {config.quantization or str(dtype).removeprefix('torch.')} take {needed / 2**30:.1f}"
            f" GiB, {available / 2**30:.1f} GiB are free on {device.type}"
        )


def available_host_bytes() -> int:
    """Returns the memory available without swapping: the least of the machine's and the control
    group's.

    Cached files count as available in both: weights that were read once would leave a service that
    starts again too little.
    """
    lines = Path("/proc/meminfo").read_text().splitlines()
    amounts = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    try:
        limit = (CONTROL_GROUP / "memory.max").read_text().strip()
        used = int((CONTROL_GROUP / "memory.current").read_text())
        lines = (CONTROL_GROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return min(amounts)  # no control group of version 2
    if limit != "max":
        stat = dict(line.split() for line in lines)
        cached = int(stat["active_file"]) + int(stat["inactive_file"])
        amounts.append(int(limit) - used + cached)
    return min(amounts)
