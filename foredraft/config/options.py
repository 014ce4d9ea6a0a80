"""A configuration field declared once gives a flag, a FOREDRAFT_* variable, a type, a help text and
a row of docs/flags.md.
"""

import argparse
import dataclasses
import difflib
import logging
import os
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from foredraft.config.flag_parser import FlagParser
from foredraft.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds, 31 years. Systems and libraries fail at longer waits, so "inf" stands for as many.
FOREVER = 1e9


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    otherwise: str = "",
    internal: bool = False,
    aliases: Sequence[str] = (),
    secret: bool = False,
    joined: bool = False,
    filled: bool = False,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """Declares a configuration field.

    Args:
        default: Value when neither flag nor variable is given.
        help: A sentence for --help and docs/flags.md.
        choices: Allowed values of a string.
        otherwise: What to do for a value that is none of them.
        internal: The field wires services together; `foredraft serve` sets it itself and hides it.
        aliases: Other flags with the same meaning, such as SGLang's newer names.
        secret: The value is handed to services by its variable alone: others can read a command
            line.
        joined: Several of the choices may be given, with commas between them.
        filled: A flag without text is refused, as where a shell's variable was never set.
        least, most: Bounds of a number. A larger float than FOREVER counts as FOREVER.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "otherwise": otherwise,
        "internal": internal,
        "aliases": tuple(aliases),
        "secret": secret,
        "joined": joined,
        "filled": filled,
        "least": least,
        "most": most,
    }
    if isinstance(default, list | dict):
        raise TypeError("use an immutable default")
    return dataclasses.field(default=default, metadata=metadata)


def flag_of(name: str) -> str:
    """`model_path` -> `--model-path`."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """`model_path` -> `FOREDRAFT_MODEL_PATH`."""
    return "FOREDRAFT_" + name.upper()


def value_type(annotation: Any) -> tuple[type, bool]:
    """Returns (element type, whether the field is a tuple of them) of `int | None`, `tuple[str,
    ...]`, `bool`.
    """
    origin = typing.get_origin(annotation)
    if origin in (types.UnionType, typing.Union):
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        return value_type(inner[0])
    if origin is tuple:
        return typing.get_args(annotation)[0], True
    return annotation, False


def convert(text: str, kind: type, name: str) -> Any:
    """Reads a flag's or variable's text. Raises ConfigError naming it."""
    if kind is bool:
        lowered = text.strip().lower()
        if lowered in ("1", "true", "yes", "on"):
            return True
        if lowered in ("0", "false", "no", "off", ""):
            return False
        raise ConfigError(f"{name}: {text!r} is neither true nor false")
    try:
        return kind(text)
    except ValueError:
        hint = ""
        if text.startswith("tcp://"):
            hint = "; Kubernetes sets it for a Service of this name: enableServiceLinks: false"
        raise ConfigError(
            f"{name}: {text!r} is not {'an' if kind is int else 'a'} {kind.__name__}{hint}"
        ) from None


def add_arguments(
    parser: argparse._ActionsContainer, config: type, *, hide_internal: bool = False
) -> None:
    """Adds a flag for each field of a configuration dataclass to a parser or one of its groups.

    Absent flags stay absent in the namespace; fields that the parser knows already are left out.
    """
    hints = typing.get_type_hints(config)
    known = {action.dest for action in parser._actions}
    for field in dataclasses.fields(config):
        if field.name in known or (hide_internal and field.metadata["internal"]):
            continue
        kind, repeated = value_type(hints[field.name])
        names = [flag_of(field.name), *field.metadata["aliases"]]
        help_text = f"{field.metadata['help']} [{variable_of(field.name)}"
        help_text += f"; default: {describe_default(field.default)}]"
        keywords: dict[str, Any] = {
            "dest": field.name,
            "default": argparse.SUPPRESS,
            "help": help_text.replace("%", "%%"),
        }
        if kind is bool:
            parser.add_argument(*names, action=argparse.BooleanOptionalAction, **keywords)
            continue
        keywords["metavar"] = kind.__name__.upper()
        if kind is str:  # the last word of the flag: PATH, HOST, KEY
            keywords["metavar"] = field.name.rpartition("_")[2].upper()
        if field.metadata["choices"]:
            keywords["metavar"] = "{" + ",".join(filter(None, field.metadata["choices"])) + "}"
        if repeated:
            keywords["action"] = "append"
        parser.add_argument(*names, **keywords)


def describe_default(value: Any) -> str:
    """Returns the text of a default in help and docs."""
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value) if value != "" else "none"


def given_values(
    config: type, namespace: argparse.Namespace, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Returns the fields that flags or variables set, converted and checked; a flag wins over
    its variable, and an empty variable counts as absent.

    Raises:
        ConfigError: A value cannot be read, is not one of the choices or out of bounds.
    """
    hints = typing.get_type_hints(config)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        kind, repeated = value_type(hints[field.name])
        source = flag_of(field.name)
        raw: Any = getattr(namespace, field.name, None)
        if raw is None:
            source = variable_of(field.name)
            raw = environ.get(source)
            if not raw:  # Compose and shells give an empty one for what was never set
                continue
            if repeated:
                raw = [part for part in raw.split(",") if part]
        elif raw == "" and field.metadata["filled"]:
            raise ConfigError(f"{source} is empty; leave it out for none")
        elif field.metadata["secret"]:
            logger.warning(
                "%s on the command line can be read by others on this machine; better: %s",
                source,
                variable_of(field.name),
            )
        if isinstance(raw, list):
            value: Any = tuple(convert(part, kind, source) for part in raw)
        else:
            value = convert(raw, kind, source) if isinstance(raw, str) else raw
        choices = field.metadata["choices"]
        if choices and value is not None:
            folded = {choice.lower(): choice for choice in choices}
            parts = str(value).split(",") if field.metadata["joined"] else [str(value)]
            for part in parts:
                if part.strip().lower() not in folded:
                    named = ", ".join(filter(None, choices))  # an empty one is "none given"
                    told = filter(
                        None, [f"{part!r} is not one of {named}", field.metadata["otherwise"]]
                    )
                    raise ConfigError(f"{source}: {'; '.join(told)}")
            value = ",".join(folded[part.strip().lower()] for part in parts)
        _check_bounds(value, field.metadata["least"], field.metadata["most"], source)
        values[field.name] = min(value, FOREVER) if isinstance(value, float) else value
    return values


def misspelt(config: type, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns variables that no field of a configuration reads, each with the one that was
    probably meant.
    """
    known = {variable_of(field.name) for field in dataclasses.fields(config)}
    unknown = [name for name in environ if name.startswith("FOREDRAFT_") and name not in known]
    near = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.9) for name in unknown}
    return {name: found[0] for name, found in near.items() if found}


def describe_bounds(least: float | None, most: float | None) -> str:
    """Returns the text of bounds in messages and docs; empty where there are none."""
    if least is not None and most is not None:
        return f"in [{least:g}, {most:g}]"
    if least is not None:
        return f"at least {least:g}"
    return "" if most is None else f"at most {most:g}"


def _check_bounds(value: Any, least: float | None, most: float | None, source: str) -> None:
    above = least is None or value >= least
    if not (above and (most is None or value <= most)):  # a NaN is out of all bounds
        raise ConfigError(f"{source} must be {describe_bounds(least, most)}, not {value}")


def parse(config: type[T], argv: Sequence[str] | None, prog: str, description: str) -> T:
    """Builds a configuration from flags and variables; exits with a message on a wrong one."""
    parser = FlagParser(
        prog=prog,
        usage=f"{prog} [flags]",
        description=description,
    )
    add_arguments(parser, config)
    namespace = parser.parse_args(argv)
    try:
        return config(**given_values(config, namespace))
    except ConfigError as error:
        parser.error(str(error))


def to_flags(values: Mapping[str, Any]) -> list[str]:
    """Returns a command line that gives `values` again, for starting a service as a process."""
    flags: list[str] = []
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(flag_of(name) if value else "--no-" + name.replace("_", "-"))
        elif isinstance(value, tuple):
            flags.extend(f"{flag_of(name)}={part}" for part in value)
        else:
            flags.append(f"{flag_of(name)}={value}")
    return flags
