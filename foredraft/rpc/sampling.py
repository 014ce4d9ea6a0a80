"""Converts sampling parameters to protobuf messages and back, by the names of their fields."""

import functools
from dataclasses import asdict, fields
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from foredraft.types import RANGES, Grammar, GrammarKind, SamplingParams, SpeculationParams

# The least float32 above 0: a 0 in a message says that a field is not given, where it may not be 0.
LEAST = 2.0**-149


def fill_sampling(message: Message, params: SamplingParams) -> None:
    """Sets the fields of a message that have the name of a parameter; leaves its other fields."""
    for name, kind in _shared(message.DESCRIPTOR).items():
        value = getattr(params, name)
        if kind.message_type is not None and not kind.is_repeated:
            if value is not None:
                setattr(getattr(message, name), value.kind.value, value.text)
        elif _is_map(kind):
            getattr(message, name).update(value)
        elif kind.message_type is not None:
            for ids in value:
                getattr(message, name).add(ids=ids)
        elif kind.is_repeated:
            getattr(message, name).extend(value)
        elif value is not None:
            setattr(message, name, max(value, LEAST) if _is_positive(kind) else value)


def read_sampling(message: Message, **others: Any) -> SamplingParams:
    """Reads the parameters that a message has; the others keep their defaults.

    Args:
        message: Any message with fields of the parameters' names. A field without presence for
            which 0 makes no sense counts as absent where it is 0.
        others: Values of parameters that the message lacks, or has in another form.
    """
    found = dict(others)
    for name, kind in _shared(message.DESCRIPTOR).items():
        if name in others:
            continue
        value = getattr(message, name)
        if kind.message_type is not None and not kind.is_repeated:
            which = value.WhichOneof("kind")
            if which is not None:
                found[name] = Grammar(GrammarKind(which), getattr(value, which))
        elif _is_map(kind):
            found[name] = dict(value)
        elif kind.message_type is not None:
            found[name] = tuple(tuple(each.ids) for each in value)
        elif kind.is_repeated:
            found[name] = tuple(value)
        elif kind.has_presence:
            if message.HasField(name):
                found[name] = value
        elif value or 0 in RANGES.get(name, (0,)):
            found[name] = value
    return SamplingParams(**found)


def fill_speculation(message: Message, params: SpeculationParams) -> None:
    """Sets the speculation parameters of a request in a message."""
    for name, value in asdict(params).items():
        if value is not None:
            setattr(message, name, value)


def read_speculation(message: Message) -> SpeculationParams:
    """Reads the speculation parameters of a request from a message.

    Raises:
        InvalidRequest: A number is out of range; names it.
    """
    return SpeculationParams(**{kind.name: value for kind, value in message.ListFields()})


@functools.cache
def _shared(descriptor: Descriptor) -> dict[str, FieldDescriptor]:
    """Returns the fields of a message type that are sampling parameters."""
    kinds = descriptor.fields_by_name
    return {each.name: kinds[each.name] for each in fields(SamplingParams) if each.name in kinds}


def _is_map(kind: FieldDescriptor) -> bool:
    return kind.message_type is not None and kind.message_type.GetOptions().map_entry


def _is_positive(kind: FieldDescriptor) -> bool:
    is_float = kind.type == FieldDescriptor.TYPE_FLOAT
    return is_float and kind.name in RANGES and 0 not in RANGES[kind.name]
