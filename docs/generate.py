"""Writes the pages of docs/ that come from the code and its tests.

`python docs/generate.py --check` only compares.

Run from the repository's root.
"""

import dataclasses
import importlib
import json
import sys
import typing
from pathlib import Path

from foredraft.cli.serve_config import ServeConfig
from foredraft.config.common import LogConfig, TargetConfig
from foredraft.config.options import (
    describe_bounds,
    describe_default,
    flag_of,
    value_type,
    variable_of,
)
from foredraft.config.services import (
    DraftConfig,
    GatewayConfig,
    VerifyConfig,
)
from foredraft.config.speculation import SpeculationConfig
from foredraft.telemetry.metrics import Family, families

NOTICE = "<!-- Written by `make docs`; edit the code instead. -->\n"
SERVICES = {
    "gateway": ("Gateway", GatewayConfig),
    "verify_service": ("Verifier", VerifyConfig),
    "draft_service": ("Draft", DraftConfig),
}
GROUPS: tuple[tuple[str, type], ...] = (
    ("Model", TargetConfig),
    ("Speculation", SpeculationConfig),
    ("Gateway", GatewayConfig),
    ("Verifier", VerifyConfig),
    ("Metrics", ServeConfig),
    ("Logging", LogConfig),
)


def flags_page() -> str:
    """The tables of all flags: those of `foredraft serve` by group, then those that wire services
    together.
    """
    lines = [
        "# Flags",
        "",
        NOTICE,
        (
            "`foredraft serve` takes all flags of the first tables and hands each service its own."
            " Every flag has a"
        ),
        (
            "variable; a flag wins over its variable, and an empty variable counts as absent. A"
            " switch has a `--no-` form. A flag"
        ),
        "that may be given several times is a list with commas in its variable.",
    ]
    # Logging's fields are in every configuration, but stand last.
    known = {field.name for field in dataclasses.fields(LogConfig)}
    for title, config in GROUPS:
        names = [
            field.name
            for field in dataclasses.fields(config)
            if not field.metadata["internal"] and (config is LogConfig or field.name not in known)
        ]
        known.update(names)
        lines += ["", f"## {title}", "", *_table(config, names)]
    lines += [
        "",
        "## Services alone",
        "",
        (
            "Each service also runs by itself, with its own part of the flags above and those that"
            " tell it where the"
        ),
        "others are. `foredraft serve` sets these itself.",
    ]
    for module, (_, config) in SERVICES.items():
        internal = [
            field.name for field in dataclasses.fields(config) if field.metadata["internal"]
        ]
        lines += ["", f"### `python -m {module}`", "", *_table(config, internal)]
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """The tables of all metrics by service."""
    lines = [
        "# Metrics",
        "",
        NOTICE,
        (
            "Prometheus text format. `foredraft serve` prints the addresses: the gateway's"
            " `/metrics` is on its HTTP"
        ),
        (
            "port, the others have ports of their own. Every process also has `process_*` metrics"
            " (memory, CPU,"
        ),
        "file descriptors).",
    ]
    seen: set[str] = set()
    sections = [("Every service", families())]
    seen.update(family.name for family in sections[0][1])
    for module, (title, _) in SERVICES.items():
        importlib.import_module(f"{module}.metrics")
        sections.append((title, [family for family in families() if family.name not in seen]))
        seen.update(family.name for family in families())
    for title, section in sections:
        lines += [
            "",
            f"## {title}",
            "",
            "| metric | kind | labels | meaning |",
            "| --- | --- | --- | --- |",
        ]
        lines += [_metric_row(family) for family in section]
    return "\n".join(lines) + "\n"


def openapi_document() -> str:
    """Returns the document that the gateway serves as /openapi.json."""
    # Imported late: the gateway's metrics belong to its section of the page above.
    app = importlib.import_module("gateway.app")
    pool = importlib.import_module("gateway.verifier_pool").VerifierPool(())
    config = GatewayConfig()
    serving = importlib.import_module("gateway.serving").Serving(config, pool)
    gate = importlib.import_module("gateway.security.gate").Gate(config)
    figures = importlib.import_module("gateway.figures").Figures(serving, ())
    return json.dumps(app.make_app(serving, gate, figures).openapi(), indent=1) + "\n"


def _table(config: type, names: list[str]) -> list[str]:
    hints = typing.get_type_hints(config)
    fields = {field.name: field for field in dataclasses.fields(config)}
    rows = ["| flag | variable | value | default | meaning |", "| --- | --- | --- | --- | --- |"]
    for name in names:
        field = fields[name]
        kind, repeated = value_type(hints[name])
        value = {bool: "switch", str: "text", int: "integer", float: "number"}[kind]
        if field.metadata["choices"]:
            value = ", ".join(f"`{choice}`" for choice in field.metadata["choices"])
        if bounds := describe_bounds(field.metadata["least"], field.metadata["most"]):
            value += f" {bounds}"
        flags = ", ".join(f"`{flag}`" for flag in (flag_of(name), *field.metadata["aliases"]))
        cells = (
            flags,
            f"`{variable_of(name)}`",
            f"{value}, repeated" if repeated else value,
            describe_default(field.default),
            field.metadata["help"],
        )
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def _metric_row(family: Family) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels)
    meaning = family.help.replace("|", "\\|")
    if family.buckets:
        meaning += f" Buckets from {family.buckets[0]:g} to {family.buckets[-1]:g}."
    return f"| `{family.name}` | {family.kind} | {labels} | {meaning} |"


def main(argv: list[str]) -> int:
    """Returns 1 when a page was stale under --check."""
    stale = []
    pages = {
        "flags.md": flags_page(),
        "metrics.md": metrics_page(),
        "openapi.json": openapi_document(),
        "request-fields.md": importlib.import_module("tests.gateway.request_fields_page").page(),
        "errors.md": importlib.import_module("tests.gateway.bad_input").page(),
    }
    for name, text in pages.items():
        path = Path(__file__).with_name(name)
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if "--check" not in argv:
            path.write_text(text)
    if stale and "--check" in argv:
        print(f"stale: {', '.join(stale)}; run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    # The services' packages lie beside docs/; the interpreter looks only in docs/ itself.
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.exit(main(sys.argv[1:]))
