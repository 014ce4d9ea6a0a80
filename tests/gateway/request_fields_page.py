"""docs/request-fields.md, made of the rows that the tests hold against a running server."""

from tests.gateway.newer_fields import MESSAGES, NEWER_FIELDS, RESPONSES
from tests.gateway.request_fields import CHAT, COMPLETIONS, FIELDS, GENERATE, GRAMMARS, SAMPLING


def page() -> str:
    """docs/request-fields.md."""
    lines = [
        "# Request fields",
        "",
        (
            "<!-- Written by `make docs` from tests/gateway/request_fields.py and newer_fields.py,"
            " which the tests hold"
        ),
        "against a running server; edit these instead. -->",
        "",
        (
            "Every field of OpenAI's, Anthropic's, SGLang's native and vLLM's requests, and what"
            " becomes of it. *Refused* is a 400 that"
        ),
        (
            "names the field in `param`; so is every field that is in none of the tables: nothing"
            " is half applied, and a"
        ),
        (
            "misspelt name is told. A field that is `null` counts as absent, and so does one"
            " of another server with the value"
        ),
        (
            "that asks for nothing, such as `use_beam_search: false`. Absent ones have OpenAI's"
            " defaults, temperature 1 and no filter,"
        ),
        "whatever the model's `generation_config.json` says.",
    ]
    for route in (COMPLETIONS, CHAT, RESPONSES, MESSAGES, GENERATE, SAMPLING):
        lines += ["", f"## `{route}`", "", "| field | whose | | how |", "| --- | --- | --- | --- |"]
        rows = [field for field in (*FIELDS, *GRAMMARS, *NEWER_FIELDS) if route in field.routes]
        order = ("honoured", "ignored", "refused")
        for field in sorted(rows, key=lambda row: (order.index(row.fate), row.name)):
            how = field.how.replace("|", "\\|")
            lines.append(f"| `{field.name}` | {field.origin} | {field.fate} | {how} |")
    return "\n".join(lines) + "\n"
