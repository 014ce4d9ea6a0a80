"""Fields of a dataclass as flags and variables: what is read, what wins, and what is refused."""

import argparse
import dataclasses
import string
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.config.options import (
    FOREVER,
    add_arguments,
    describe_default,
    flag_of,
    given_values,
    misspelt,
    option,
    parse,
    to_flags,
    value_type,
    variable_of,
)
from foredraft.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    name: str = option("", "A name.", aliases=("--title",))
    size: int = option(8, "A size.")
    limit: int | None = option(None, "A limit.")
    share: float = option(0.5, "A share, 100 % at most.")
    count: int = option(3, "A count.", least=1, most=9)
    wait: float | None = option(None, "Seconds.", least=0)
    shy: bool = option(False, "Hide.")
    colour: str = option("Red", "A colour.", choices=("Red", "Blue"))
    border: str = option("", "A border, if any.", choices=("", "thick", "dotted"))
    head_path: str = option("", "A place.")
    key: str = option("", "A key.", filled=True)
    peers: tuple[str, ...] = option((), "Peers.", internal=True)


def read(*flags: str, **variables: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_arguments(parser, Sample)
    environ = {f"FOREDRAFT_{name.upper()}": text for name, text in variables.items()}
    return given_values(Sample, parser.parse_args(flags), environ)


def test_what_is_not_given_is_absent() -> None:
    assert read() == {}
    assert Sample(**read()) == Sample()


def test_flags_are_converted() -> None:
    values = read("--name", "a b", "--size=16", "--limit", "3", "--share", "1e-2", "--shy")
    assert values == {"name": "a b", "size": 16, "limit": 3, "share": 0.01, "shy": True}


def test_longer_waits_than_systems_take_are_as_long_as_they_take() -> None:
    assert read("--wait", "inf", "--count", "9") == {"wait": FOREVER, "count": 9}
    assert read("--wait", "3e7") == {"wait": 3e7}
    assert FOREVER < threading.TIMEOUT_MAX


def test_a_misspelt_variable_is_guessed() -> None:
    environ = dict.fromkeys(
        ("FOREDRAFT_HEAD_PAHT", "FOREDRAFT_SIZE", "FOREDRAFT_OTHER", "HEAD_PAHT"), "x"
    )
    assert misspelt(Sample, environ) == {"FOREDRAFT_HEAD_PAHT": "FOREDRAFT_HEAD_PATH"}


def test_an_alias_means_the_same() -> None:
    assert read("--title", "x") == {"name": "x"}


def test_a_flag_wins_over_its_variable() -> None:
    assert read("--size", "1", size="2", share="0.1") == {"size": 1, "share": 0.1}


def test_a_flag_can_turn_off_what_a_variable_turns_on() -> None:
    assert read("--no-shy", shy="1") == {"shy": False}


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("Yes", True), ("on", True), ("true", True), ("0", False), ("off", False)],
)
def test_switches_by_variable(text: str, value: bool) -> None:
    assert read(shy=text) == {"shy": value}


def test_an_empty_variable_counts_as_absent() -> None:
    assert read(size="", shy="", colour="", key="", peers="", name="") == {}
    assert read("--title", "", name="x") == {"name": ""}


def test_choices_ignore_case_and_give_the_declared_spelling() -> None:
    assert read("--colour", "bLUE") == {"colour": "Blue"}
    assert read(colour="red") == {"colour": "Red"}


def test_repeated_flags_and_listed_variables_give_tuples() -> None:
    assert read("--peers", "a", "--peers", "b") == {"peers": ("a", "b")}
    assert read(peers="a,b,") == {"peers": ("a", "b")}


@pytest.mark.parametrize(
    ("flags", "variables", "message"),
    [
        (["--size", "many"], {}, "--size: 'many' is not an int"),
        (["--share", "half"], {}, "--share: 'half' is not a float"),
        (["--colour", "green"], {}, "--colour: 'green' is not one of Red, Blue"),
        (["--border", "thin"], {}, "--border: 'thin' is not one of thick, dotted"),
        ([], {"size": "1.5"}, "FOREDRAFT_SIZE: '1.5' is not an int"),
        ([], {"shy": "maybe"}, "FOREDRAFT_SHY: 'maybe' is neither true nor false"),
        (["--colour", ""], {}, "--colour: '' is not one of"),
        (["--key", ""], {}, "--key is empty; leave it out for none"),
        (["--count", "10"], {}, "--count must be in [1, 9], not 10"),
        ([], {"count": "0"}, "FOREDRAFT_COUNT must be in [1, 9], not 0"),
        (["--wait", "-0.5"], {}, "--wait must be at least 0, not -0.5"),
        (["--wait", "nan"], {}, "--wait must be at least 0, not nan"),
        (["--wait=-inf"], {}, "--wait must be at least 0, not -inf"),
    ],
)
def test_a_wrong_value_names_where_it_came_from(
    flags: list[str], variables: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError) as wrong:
        read(*flags, **variables)
    assert message in str(wrong.value)


def test_internal_flags_can_be_hidden() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser, Sample, hide_internal=True)
    assert "--peers" not in parser.format_help()
    assert "--size" in parser.format_help()


def test_help_names_variable_and_default() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, Sample)
    text = " ".join(parser.format_help().split())
    assert "A size. [FOREDRAFT_SIZE; default: 8]" in text
    assert "A share, 100 % at most." in text
    assert "--shy, --no-shy" in text
    assert "--head-path PATH A place." in text
    assert "{Red,Blue}" in text


def test_fields_known_to_the_parser_are_not_added_twice() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_argument_group("first"), Sample)
    add_arguments(parser.add_argument_group("second"), Sample)
    assert parser.format_help().count("A size.") == 1


def test_parsing_exits_with_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(Sample, ["--size", "x"], "sample", "A sample.")
    assert stopped.value.code == 2
    assert "sample: error: --size: 'x' is not an int" in capsys.readouterr().err


def test_an_abbreviated_flag_is_refused() -> None:
    with pytest.raises(SystemExit):
        parse(Sample, ["--siz", "3"], "sample", "A sample.")


def test_names() -> None:
    assert flag_of("model_path") == "--model-path"
    assert variable_of("model_path") == "FOREDRAFT_MODEL_PATH"
    assert value_type(int | None) == (int, False)
    assert value_type(tuple[str, ...]) == (str, True)
    assert [describe_default(value) for value in (None, True, False, (), ("a", "b"), "", 3)] == [
        "auto",
        "on",
        "off",
        "none",
        "a, b",
        "none",
        "3",
    ]


def test_a_mutable_default_is_refused() -> None:
    with pytest.raises(TypeError):
        option([], "A list.")


TEXT = st.text(string.printable.strip() + " äß-=", max_size=20)
SAMPLES = st.fixed_dictionaries(
    {},
    optional={
        "name": TEXT,
        "size": st.integers(),
        "limit": st.integers(),
        "share": st.floats(max_value=FOREVER, allow_nan=False),
        "shy": st.booleans(),
        "colour": st.sampled_from(["Red", "Blue"]),
        "peers": st.lists(TEXT, min_size=1, max_size=3).map(tuple),
    },
)


@given(SAMPLES)
def test_flags_give_the_values_they_were_made_from(values: dict[str, Any]) -> None:
    assert read(*to_flags(values)) == values


def test_none_has_no_flag() -> None:
    assert to_flags({"limit": None, "size": 3}) == ["--size=3"]
