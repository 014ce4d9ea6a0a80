"""Reads a checkpoint's `quantization_config`: the quantised matrices and their form. Torch-free."""

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError
from foredraft.layers.weight_scheme import BLOCK, GGUF_SCHEMES, Layout, WeightScheme
from foredraft.models.config_reader import Reader

GROUP_SIZES = (32, 64, 128)
BLOCKS = [BLOCK, BLOCK]
VOCABULARY = ("model.embed_tokens", "lm_head")
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_REMEDY = (
    "serve a checkpoint in FP8, AWQ, GPTQ or compressed-tensors (float-, int- or pack-quantized), "
    "or the bf16 one with --quantization fp8, int8 or int4 (a draft with "
    "--speculative-draft-model-quantization)"
)


@dataclass(frozen=True, slots=True)
class Quantization:
    """Describes the quantised weights of a checkpoint.

    Attributes:
        method: Tool or format, as config.json names it.
        scheme: Form of every quantised matrix; of a GGUF file, of most.
        skipped: Names or patterns of modules that keep plain weights; `re:` begins a regular
            expression.
        targets: Names of the only modules that are quantised, or `re:` and a regular expression;
            empty for all that are not skipped.
        has_vocabulary: Whether embedding and LM head have that form too.
        is_on_load: Whether the checkpoint is plain, and its matrices are quantised during loading.
        types: Type of each quantised matrix of a GGUF file, by its name; empty for others.
    """

    method: str
    scheme: WeightScheme
    skipped: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    has_vocabulary: bool = False
    is_on_load: bool = False
    types: Mapping[str, str] = field(default_factory=dict)

    def skips(self, name: str) -> bool:
        """Returns whether the matrix `name`, such as model.layers.0.self_attn.q_proj, is not
        quantised.
        """
        if self.types:
            return name not in self.types
        if self.targets and not any(_is_target(name, target) for target in self.targets):
            return True
        return any(_matches(name, pattern) for pattern in self.skipped)

    def scheme_of(self, name: str) -> WeightScheme | None:
        """Returns the form of the matrix `name`; None for plain weights."""
        if self.skips(name) or (name in VOCABULARY and not self.has_vocabulary):
            return None
        return GGUF_SCHEMES[self.types[name]] if self.types else self.scheme

    @property
    def kind(self) -> str:
        """`fp8`, `int8` or `int4`."""
        return "fp8" if self.scheme.layout == "fp8" else f"int{self.scheme.bits}"

    def __str__(self) -> str:
        if self.types:
            counts = Counter(self.types.values()).most_common()
            return f"{self.method} {', '.join(f'{kind} ({count})' for kind, count in counts)}"
        return f"{self.method} {self.scheme}"


def on_load(
    stored: Quantization | None, kind: str, group_size: int | None, where: Path
) -> Quantization:
    """Returns the quantisation of a checkpoint that is loaded with `--quantization`.

    Args:
        stored: Quantisation of the checkpoint, if it has one.
        kind: `fp8`, `int8` or `int4`.
        group_size: Number of inputs that share a scale in `int4`; 128 when None.
        where: The checkpoint, for errors.

    Raises:
        CheckpointError: The checkpoint is quantised in another way.
    """
    schemes = {
        "fp8": WeightScheme("fp8", 8, "channel"),
        "int8": WeightScheme("int8", 8, "channel"),
        "int4": WeightScheme("packed", 4, "group", group_size or 128, has_zeros=True),
    }
    if stored is None:
        return Quantization("--quantization", schemes[kind], is_on_load=True)
    if stored.kind != kind or group_size not in (None, stored.scheme.group_size):
        flags = f"--quantization {kind}"
        if group_size is not None:
            flags += f" --quantization-group-size {group_size}"
        raise CheckpointError(
            f"{where}: {flags}: the checkpoint is {stored} already; leave the"
            f" {'flags' if group_size else 'flag'} out"
        )
    return stored


def _matches(name: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    if "*" in pattern:
        return fnmatch.fnmatchcase(name, pattern)
    return f".{pattern.strip('.')}." in f".{name}."


def _is_target(name: str, target: str) -> bool:
    return _matches(name, target) if target.startswith("re:") else name == target


def read_quantization(reader: Reader) -> Quantization | None:
    """Reads config.json (`quantization_config`, else `compression_config`); None for plain
    weights.

    Scales of keys and values alone, without quantised weights, count as plain.

    Raises:
        CheckpointError: The format, or a variant of it, is not read; it is named.
    """
    key = next((key for key in QUANTIZATION_KEYS if reader.raw.get(key)), None)
    if key is None:
        return None
    raw = reader.mapping(key)
    method = str(raw.get("quant_method", "unknown method"))
    read = _METHODS.get(method)
    quantization = Reader(raw, f"{reader.where}: {key}")
    if read is None:
        raise _refusal(quantization, f"quantized checkpoints ({method}) are not supported")
    return read(quantization, method)


def _refusal(reader: Reader, what: str) -> Exception:
    return reader.fail(f"{what}; {_REMEDY}")


def _names(reader: Reader, *keys: str) -> tuple[str, ...]:
    """Returns the module names in the lists under these keys."""
    found: list[str] = []
    for key in keys:
        value = reader.raw.get(key) or []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise reader.fail(f"{key} must be a list of names, not {value!r}")
        found += value
    for name in found:
        if name.startswith("re:"):
            _check_pattern(reader, name[3:])
    return tuple(found)


def _check_pattern(reader: Reader, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise _refusal(reader, f"{pattern!r} is no regular expression ({error})") from error


def _expect(reader: Reader, key: str, allowed: Iterable[Any], default: Any) -> Any:
    value = reader.raw.get(key, default)
    if value not in tuple(allowed):
        raise _refusal(reader, f"{key} {value!r} is not supported")
    return value


def _check_group(reader: Reader, size: Any) -> int:
    """Checks a group size; 0 for one scale per output, which files call -1 or null."""
    if size in (None, -1):
        return 0
    if size not in GROUP_SIZES:
        raise _refusal(reader, f"group_size {size!r} is not one of {GROUP_SIZES}")
    return int(size)


def _fp8(reader: Reader, method: str) -> Quantization:
    _expect(reader, "activation_scheme", ("dynamic", "static", None), None)
    _expect(reader, "fmt", ("e4m3", None), None)
    skipped = _names(reader, "modules_to_not_convert", "ignored_layers")
    block = reader.raw.get("weight_block_size")
    if block is None:
        return Quantization(method, WeightScheme("fp8", 8, "tensor"), skipped)
    if block != BLOCKS:
        raise _refusal(reader, f"weight_block_size {block} is not {BLOCKS}")
    return Quantization(
        method, WeightScheme("fp8", 8, "block", scale_name="weight_scale_inv"), skipped
    )


def _fbgemm(reader: Reader, method: str) -> Quantization:
    skipped = _names(reader, "modules_to_not_convert")
    return Quantization(method, WeightScheme("fp8", 8, "channel"), skipped)


_MODELOPT = {
    "FP8": WeightScheme("fp8", 8, "tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightScheme("fp8", 8, "channel"),
}


def _modelopt(reader: Reader, method: str) -> Quantization | None:
    algorithm = reader.raw.get("quant_algo")
    if not algorithm and reader.raw.get("kv_cache_quant_algo"):
        return None
    if not isinstance(algorithm, str) or algorithm not in _MODELOPT:
        raise _refusal(reader, f"quant_algo {algorithm!r} of ModelOpt is not supported")
    skipped = _names(reader, "exclude_modules", "ignore")
    return Quantization(method, _MODELOPT[algorithm], skipped)


def _awq(reader: Reader, method: str) -> Quantization:
    _expect(reader, "bits", (4,), 4)
    version = str(reader.raw.get("version", reader.raw.get("format", "gemm"))).lower()
    if version != "gemm":
        raise _refusal(reader, f"AWQ version {version!r} is not gemm")
    group = _check_group(reader, reader.raw.get("group_size", 128))
    scheme = WeightScheme(
        "awq", 4, "group" if group else "channel", group, has_zeros=True, scale_name="scales"
    )
    return Quantization(method, scheme, _names(reader, "modules_to_not_convert"))


def _gptq(reader: Reader, method: str) -> Quantization:
    bits = _expect(reader, "bits", (4, 8), 4)
    # GPTQModel's key, and transformers'.
    key = next((key for key in ("checkpoint_format", "format") if reader.raw.get(key)), "format")
    form = _expect(reader, key, ("gptq", "gptq_v2", None), "gptq")
    if reader.raw.get("lm_head"):
        raise _refusal(reader, "lm_head true, a quantised LM head, is not supported")
    skipped = _names(reader, "modules_to_not_convert")
    for pattern, value in reader.mapping("dynamic").items():
        # GPTQModel: "-:" and a regular expression leaves modules out, "+:" gives them another form.
        if not pattern.startswith("-:"):
            raise _refusal(
                reader, f"dynamic {pattern!r}: {value!r}: mixed schemes are not supported"
            )
        _check_pattern(reader, pattern[2:])
        skipped += (f"re:{pattern[2:]}",)
    group = _check_group(reader, reader.raw.get("group_size", 128))
    scheme = WeightScheme(
        "gptq",
        bits,
        "group" if group else "channel",
        group,
        has_zeros=True,
        has_order=reader.flag("desc_act", False) and group > 0,
        zero_offset=0 if form == "gptq_v2" else 1,
        scale_name="scales",
    )
    return Quantization(method, scheme, skipped)


def _gguf(reader: Reader, method: str) -> Quantization:
    """Reads what `gguf_convert` writes."""
    types = reader.mapping("types")
    if unknown := sorted(set(map(str, types.values())) - set(GGUF_SCHEMES)):
        raise _refusal(reader, f"GGUF types {', '.join(unknown)} are not supported")
    [(most, _)] = Counter(types.values()).most_common(1)
    has_vocabulary = any(name in types for name in VOCABULARY)
    return Quantization(
        method, GGUF_SCHEMES[most], has_vocabulary=has_vocabulary, types=dict(types)
    )


def _compressed(reader: Reader, method: str) -> Quantization | None:
    groups = reader.mapping("config_groups")
    if not groups:
        if reader.raw.get("kv_cache_scheme"):
            return None
        raise reader.fail("config_groups is missing")
    schemes = {_compressed_scheme(reader, name, group) for name, group in groups.items()}
    if len(schemes) > 1:
        raise _refusal(
            reader, f"mixed schemes ({', '.join(sorted(map(str, schemes)))}) are not supported"
        )
    _check_transforms(reader)
    status = reader.raw.get("quantization_status", "compressed")
    if status not in ("compressed", "frozen"):
        raise _refusal(reader, f"quantization_status {status!r} is not compressed")
    [scheme] = schemes
    skipped = _names(reader, "ignore")
    targets = tuple(target for group in groups.values() for target in group["targets"])
    has_vocabulary = "Embedding" in targets
    if "Linear" in targets:
        targets = ()
    found = Quantization(method, scheme, skipped, targets, has_vocabulary)
    if has_vocabulary and (scheme.layout != "packed" or found.skips("lm_head")):
        raise _refusal(
            reader, "targets Embedding is not supported but for pack-quantized, LM head included"
        )
    return found


def _check_transforms(reader: Reader) -> None:
    """Raises CheckpointError where activations are to be transformed; what was done to weights is
    in them already.
    """
    transforms = Reader(reader.mapping("transform_config"), f"{reader.where}.transform_config")
    for name, group in transforms.mapping("config_groups").items():
        steps = group.get("apply") if isinstance(group, Mapping) else None
        for step in steps if isinstance(steps, list) else [steps]:
            location = step.get("location") if isinstance(step, Mapping) else step
            if location not in ("weight_input", "weight_output"):
                raise _refusal(transforms, f"{name}: a transform at {location!r} is not supported")


def _compressed_scheme(reader: Reader, name: str, group: Any) -> WeightScheme:
    if not isinstance(group, Mapping):
        raise reader.fail(f"config_groups.{name} must be an object")
    own = Reader(group, f"{reader.where}.config_groups.{name}")
    _check_targets(own)
    if own.raw.get("output_activations"):
        raise _refusal(own, "output_activations are not supported")
    form = own.raw.get("format") or reader.raw.get("format")
    weights = Reader(own.mapping("weights"), f"{own.where}.weights")
    kind, bits = str(weights.raw.get("type", "int")), weights.raw.get("num_bits", 8)
    strategy, is_symmetric = weights.raw.get("strategy"), weights.flag("symmetric", True)
    plain_forms = {"float": "float-quantized", "int": "int-quantized"}
    is_plain = bits == 8 and is_symmetric and form in (plain_forms.get(kind), "naive-quantized")
    layout: Layout = "fp8" if kind == "float" else "int8"
    if is_plain and strategy in ("tensor", "channel"):
        return WeightScheme(layout, 8, strategy)
    blocks = weights.raw.get("block_structure")
    if is_plain and layout == "fp8" and strategy == "block" and blocks in (BLOCKS, "128x128"):
        return WeightScheme("fp8", 8, "block")
    is_packed = kind == "int" and bits in (4, 8) and form == "pack-quantized"
    if is_packed and strategy in ("group", "channel"):
        size = _check_group(weights, weights.raw.get("group_size"))
        return WeightScheme(
            "packed",
            bits,
            strategy,
            size if strategy == "group" else 0,
            has_zeros=not is_symmetric,
            has_order=weights.raw.get("actorder") in ("group", "dynamic"),
        )
    symmetry = "symmetric" if is_symmetric else "asymmetric"
    raise _refusal(
        own, f"{form} weights of {bits} bits ({kind}, by {strategy}, {symmetry}) are not supported"
    )


def _check_targets(group: Reader) -> None:
    """Raises CheckpointError unless a group's targets are names, patterns or `Linear`, which may
    have `Embedding` beside it.
    """
    targets = _names(group, "targets")
    # Names of modules have dots, but for the LM head's; those of classes have none.
    classes = {one for one in targets if not one.startswith("re:") and "." not in one}
    if not targets or classes - {"lm_head"} not in (set(), {"Linear"}, {"Linear", "Embedding"}):
        raise _refusal(
            group, f"targets {list(targets)}: of classes only Linear and Embedding are supported"
        )


_METHODS: dict[str, Callable[[Reader, str], Quantization | None]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "modelopt": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "gguf": _gguf,
}
