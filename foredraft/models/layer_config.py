"""Reads from config.json what differs from layer to layer: windows and rotary embeddings."""

from foredraft.models.config_reader import Reader
from foredraft.models.families import Family
from foredraft.models.rope_config import RopeConfig, read_rope


def layer_types(reader: Reader, family: Family, num_layers: int) -> list[str]:
    """Returns the kind of each layer: full_attention or sliding_attention."""
    raw = reader.raw
    types = raw.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
            raise reader.fail(f"layer_types must be a list of names, not {types!r}")
        if len(types) != num_layers:
            raise reader.fail(f"layer_types has {len(types)} entries for {num_layers} layers")
        unknown = set(types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise reader.fail(f"layer type {min(unknown)!r} is not supported")
        return list(types)
    if family.sliding == "pattern":
        pattern = reader.size("sliding_window_pattern", 6)
        return [
            "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention"
            for layer in range(num_layers)
        ]
    first = num_layers
    if window(reader, family) is not None:
        first = int(reader.number("max_window_layers", 28)) if family.sliding == "upper" else 0
    return [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]


def window(reader: Reader, family: Family) -> int | None:
    """Returns the number of positions that layers of sliding attention see; None for no window."""
    if family.sliding == "none":
        return None
    if family.sliding == "upper" and not reader.flag("use_sliding_window", False):
        return None
    if reader.raw.get("sliding_window", 0) is None:
        return None
    return reader.size("sliding_window", 4096)


def ropes(
    reader: Reader, family: Family, types: list[str], max_positions: int
) -> tuple[RopeConfig, ...]:
    """Returns the rotary embedding of each layer.

    Reads the old keys (rope_theta, rope_scaling) and transformers 5's rope_parameters.
    """
    raw = reader.raw
    given, scaling = reader.mapping("rope_parameters"), reader.mapping("rope_scaling")
    is_nested = any(kind in given for kind in ("full_attention", "sliding_attention"))
    if is_nested and not family.gemma:
        raise reader.fail("rope_parameters by layer type are for Gemma3ForCausalLM alone")
    if family.gemma and given and not is_nested:
        raise reader.fail(
            "rope_parameters must be by layer type (full_attention, sliding_attention)"
        )
    by_type: dict[str, RopeConfig] = {}
    for kind in set(types):
        local = family.gemma and kind == "sliding_attention"
        if is_nested:
            parameters = dict(Reader(given, reader.where).mapping(kind))
        else:
            parameters = {} if local else dict(scaling or given)
        if family.gemma and not local:
            # Scaling is for Gemma's full layers alone; its sliding layers have a theta of their
            # own.
            parameters |= scaling
        if local:
            theta = reader.number("rope_local_base_freq", 10_000.0)
        else:
            theta = reader.number("rope_theta", 1_000_000.0 if family.gemma else 10_000.0)
        by_type[kind] = read_rope(
            Reader(parameters, reader.where), theta, max_positions, raw, is_stretched=family.gemma
        )
    return tuple(by_type[kind] for kind in types)
