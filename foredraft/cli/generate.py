"""`foredraft generate`: one prompt, its continuation streamed to the terminal, drafted tokens in
another colour.
"""

import argparse
import contextlib
import dataclasses
import errno
import http.client
import ipaddress
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from foredraft.cli import serve_config, stack
from foredraft.cli.serve import read_values
from foredraft.config import api_keys
from foredraft.config.flag_parser import FlagParser
from foredraft.config.options import add_arguments, flag_of
from foredraft.errors import ConfigError, ForedraftError, Unavailable
from foredraft.telemetry.logging import setup

DESCRIPTION = """\
Prints the continuation of a prompt as it comes, drafted tokens in green, and how fast it was.

Starts the services for this one call, with the flags of `foredraft serve`; with --server it asks
a gateway that runs already and starts nothing.
"""
EXAMPLES = """\
examples:
  foredraft generate "The quick brown fox"
  foredraft generate --chat "Why is the sky blue?" --max-tokens 200 --temperature 0.7 --seed 1
  foredraft generate --server http://127.0.0.1:30000 "Once upon a time"
  foredraft generate --no-speculation "The same text, only slower"
  cat notes.txt | foredraft generate -
"""
DRAFTED_STYLE = "green"
# Services that live for one call on this machine omit flags that only servers for others need.
PRIVATE = {"ssl_certfile": "", "ssl_keyfile": "", "ssl_ca_certs": "", "api_key_file": ""}
# Longer than any deadline of a gateway: it is the server that ends a request.
SILENCE_SECONDS = 3600.0


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0, 1 for a failure, 2 for a wrong flag, 130 after Ctrl-C."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    try:
        _read_texts(arguments)
        if arguments.system and not arguments.chat:
            raise ConfigError("--system needs --chat")
        values = read_values(arguments)
        if not arguments.server:
            # The usual ports may belong to a gateway that runs.
            values = {"port": 0, "grpc_port": 0, **values, **PRIVATE}
            serve_config.check(values)
        elif values_given := _service_flags(arguments):
            raise ConfigError(f"--server starts no services: {values_given[0]} has no use with it")
        elif key := values.get("api_key"):
            api_keys.single(key, api_keys.Limits())  # says what no header can hold
    except ConfigError as error:
        parser.error(str(error))
    console = Console(stderr=True, highlight=False)
    setup("generate", "warning")
    try:
        with contextlib.ExitStack() as running:
            url = arguments.server or running.enter_context(_services(values, console))
            url = url if "://" in url else f"http://{url}"
            # OpenAI's clients are given the address with /v1.
            url = url.rstrip("/").removesuffix("/v1")
            _print_stream(url, arguments, console, values.get("api_key", ""))
    except ForedraftError as error:
        console.print(Text(f"foredraft generate: {error}", style="bold red"), soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the text has seen enough; the interpreter must not try to flush what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        text = f"foredraft generate: the text cannot be written: {error.strerror}"
        console.print(Text(text, style="bold red"), soft_wrap=True)
        return 1
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser: flags of one generation, then flags of the services it starts."""
    parser = FlagParser(
        prog="foredraft generate",
        usage="foredraft generate [flags] PROMPT",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "prompt", metavar="PROMPT", help="The text to continue; - reads it from standard input."
    )
    parser.add_argument(
        "--server",
        default="",
        metavar="URL",
        help="A gateway that runs already, such as http://127.0.0.1:30000 or 127.0.0.1:30000.",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="Send the prompt as a user's message, through the model's chat template.",
    )
    parser.add_argument("--system", metavar="TEXT", help="With --chat, a system message before it.")
    parser.add_argument(
        "--max-tokens", type=int, default=128, metavar="INT", help="Tokens at most (default: 128)."
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="FLOAT",
        help="0 always takes the likeliest token (default: 0).",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="FLOAT",
        help="Smallest set of tokens whose probability reaches this.",
    )
    parser.add_argument("--top-k", type=int, metavar="INT", help="So many of the likeliest tokens.")
    parser.add_argument(
        "--seed",
        type=int,
        metavar="INT",
        help="Same seed, same text; random and printed when absent.",
    )
    parser.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="Text that ends the output; may be given several times.",
    )
    parser.add_argument(
        "--no-speculation",
        action="store_true",
        help="Draft nothing for this prompt: the same text, only slower.",
    )
    services = parser.add_argument_group("services, as in foredraft serve")
    add_arguments(services, serve_config.ServeConfig, hide_internal=True)
    return parser


def _read_texts(arguments: argparse.Namespace) -> None:
    """Reads standard input and the texts of the command line as UTF-8, whatever the locale says.

    Raises:
        ConfigError: One is something else.
    """
    try:
        if arguments.prompt == "-":
            sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # type: ignore[union-attr]
            arguments.prompt = sys.stdin.read()
        else:
            arguments.prompt = _as_utf8(arguments.prompt)
        if arguments.system:
            arguments.system = _as_utf8(arguments.system)
        if arguments.stop:
            arguments.stop = [_as_utf8(text) for text in arguments.stop]
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt and other texts must be UTF-8: {error}") from None


def _as_utf8(text: str) -> str:
    given = os.fsencode(text)
    with contextlib.suppress(UnicodeDecodeError):
        return given.decode()
    # Text in the locale's own encoding, unless that left bytes over, as surrogates.
    return given.decode() if any("\ud800" <= c <= "\udfff" for c in text) else text


def _service_flags(arguments: argparse.Namespace) -> list[str]:
    """Returns flags of services that were given on the command line; unlike variables they were
    meant for this call.
    """
    names = [field.name for field in dataclasses.fields(serve_config.ServeConfig)]
    return [flag_of(name) for name in names if hasattr(arguments, name) and name != "api_key"]


@contextlib.contextmanager
def _services(values: Mapping[str, Any], console: Console) -> Iterator[str]:
    """Runs a gateway, a verifier and a draft; yields the gateway's URL."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with console.status("preparing the model"):
        resolved = serve_config.resolve_models(values)
    with stack.make_supervisor(resolved) as supervisor:
        with console.status("starting the services"):
            supervisor.wait_healthy()
        yield supervisor.urls["http"]


def _print_stream(url: str, arguments: argparse.Namespace, console: Console, api_key: str) -> None:
    """Prints the text to standard output and the closing line to standard error."""
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    output = Console(highlight=False, soft_wrap=True)
    started = time.monotonic()
    first = last = 0.0
    num_tokens = 0
    end: dict[str, Any] = {}
    for event in _events(url, _body(arguments), arguments.chat, api_key):
        for choice in event["choices"]:
            if choice["provenance"] and not num_tokens:
                first = time.monotonic()
            for token in choice["provenance"]:
                num_tokens += 1
                _print_token(output, token["text"], token["drafted"])
            sys.stdout.flush()
            last = time.monotonic()
            end = choice if choice["finish_reason"] else end
    output.print()
    if not end:
        raise Unavailable("the stream ended without a reason")
    line = _closing_line(end, num_tokens, first - started, last - first)
    console.print(Text(line, style="dim"), soft_wrap=True)


def _print_token(output: Console, text: str, drafted: bool) -> None:
    if not output.is_terminal:
        sys.stdout.write(text)
        return
    # A model's text must not control the terminal.
    shown = "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)
    output.print(Text(shown, style=DRAFTED_STYLE if drafted else ""), end="")


def _closing_line(
    end: Mapping[str, Any], num_tokens: int, wait_seconds: float, stream_seconds: float
) -> str:
    parts = [f"{num_tokens} tokens"]
    if num_tokens:
        parts.append(f"the first after {wait_seconds:.2f} s")
    if num_tokens > 1 and stream_seconds > 0:
        parts.append(f"then {(num_tokens - 1) / stream_seconds:.1f} tokens/s")
    speculation = end["speculation"]
    parts.append(f"accept length {speculation['accept_length']:.2f}")
    if drafted := speculation["drafted_tokens"]:
        parts.append(f"{speculation['accepted_tokens']} of {drafted} drafted tokens accepted")
    return " · ".join([*parts, f"seed {end['seed']}", f"ended by {end['finish_reason']}"])


def _body(arguments: argparse.Namespace) -> dict[str, Any]:
    body: dict[str, Any] = {
        "stream": True,
        "return_provenance": True,
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "top_p": arguments.top_p,
        "top_k": arguments.top_k,
        "seed": arguments.seed,
        "stop": arguments.stop,
        "speculation": {"enabled": False} if arguments.no_speculation else None,
    }
    if not arguments.chat:
        return {**body, "prompt": arguments.prompt}
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    return {**body, "messages": [*system, {"role": "user", "content": arguments.prompt}]}


def _events(
    url: str, body: Mapping[str, Any], chat: bool, api_key: str
) -> Iterator[dict[str, Any]]:
    """Yields the events of a streamed answer.

    Raises:
        ForedraftError: The gateway refused, failed, or cannot be reached.
    """
    path = "/v1/chat/completions" if chat else "/v1/completions"
    headers = {"content-type": "application/json"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    try:
        with _opener(url).open(request, timeout=SILENCE_SECONDS) as response:
            for line in response:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                if data:
                    event = json.loads(data)
                    _raise_error(event)
                    yield event
    except urllib.error.HTTPError as error:
        with contextlib.suppress(ValueError):
            _raise_error(json.loads(error.read()))
        raise ForedraftError(f"{url} answers {error.code} {error.reason}") from None
    except http.client.HTTPException as error:
        if isinstance(error, http.client.IncompleteRead):
            raise Unavailable(f"the answer from {url} broke off") from error
        raise Unavailable(f"no answer from {url}: what listens there speaks no HTTP") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        hint = ""
        if isinstance(reason, ConnectionRefusedError):
            hint = (
                "; `foredraft serve` starts a server, and without --server there is one for this"
                " call"
            )
        raise Unavailable(f"no answer from {url}: {reason}{hint}") from error


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Returns what opens a server's routes: by the environment's proxy unless it is on this
    machine.
    """
    host = urllib.parse.urlsplit(url).hostname or ""
    is_here = host == "localhost"
    with contextlib.suppress(ValueError):
        is_here = ipaddress.ip_address(host).is_loopback
    handlers = [urllib.request.ProxyHandler({})] if is_here else []
    return urllib.request.build_opener(*handlers)


def _raise_error(event: Mapping[str, Any]) -> None:
    if "error" in event:
        raise ForedraftError(str(event["error"]["message"]))
