"""`foredraft serve`: the services on this machine, seen from a terminal."""

import argparse
import dataclasses
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.text import Text

from foredraft.cli import stack
from foredraft.cli.serve_config import ServeConfig, check, resolve_models, settle_draft
from foredraft.cli.supervisor import ChildState, Supervisor
from foredraft.config.common import LogConfig, TargetConfig
from foredraft.config.flag_parser import FlagParser
from foredraft.config.options import add_arguments, given_values, misspelt
from foredraft.config.services import (
    GatewayConfig,
    VerifyConfig,
)
from foredraft.config.speculation import SpeculationConfig
from foredraft.errors import CheckpointError, ConfigError, ForedraftError
from foredraft.telemetry.logging import setup

DESCRIPTION = """\
Serves a model on this machine: starts a gateway (text, HTTP and gRPC), a verifier (the target
model) and a draft (cheap guesses that the verifier checks), waits until all are healthy, restarts
what dies, and stops everything on Ctrl-C. A draft is restarted without end; a gateway or verifier
that dies a sixth time within five minutes ends it.

Every flag has a FOREDRAFT_* variable; a flag wins over its variable, an empty one counts as absent.
"""
EXAMPLES = """\
examples:
  foredraft serve
      the demo model, drafted from n-grams of what it has seen
  foredraft serve --model-path ~/models/Qwen3-0.6B --port 8000
      a Hugging Face directory
  foredraft serve --model-path big/ --speculative-algorithm STANDALONE \\
      --speculative-draft-model-path small/ --speculative-num-steps 5
      a small model drafts for a big one
  foredraft serve --model-path big/ --speculative-algorithm EAGLE3,NGRAM \\
      --speculative-draft-model-path head/
      two drafts: each sequence gets the one that brings more
  FOREDRAFT_MODEL_PATH=model.gguf foredraft serve --speculative-algorithm NONE
      plain decoding, configured by a variable
"""
_GROUPS: tuple[tuple[str, type], ...] = (
    ("model", TargetConfig),
    ("speculation", SpeculationConfig),
    ("gateway", GatewayConfig),
    ("verifier", VerifyConfig),
    ("metrics", ServeConfig),
)
# Any model goes on with it, much of it as it began: drafts of every kind show what they can.
FIRST_PROMPT = (
    "class Point:\n    @property\n    def x(self):\n        return self._x\n\n    @property\n   "
    " def y(self):\n"
)
_COLOURS = {"gateway": "cyan", "verify": "green", "draft": "magenta"}

logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0 after a stop that was asked for, 1 for a failure, 2 for a wrong
    flag.
    """
    parser = make_parser()
    namespace = parser.parse_args(argv)
    try:
        values, found = settle_draft(read_values(namespace))
        config = check(values)
    except (ConfigError, CheckpointError) as error:
        parser.error(str(error))
    setup("serve", config.log_level, config.log_format)
    if found:
        logger.info(found)
    for name, near in misspelt(ServeConfig).items():
        logger.warning("%s is read by nothing; did you mean %s?", name, near)
    terminal = Terminal(plain=config.log_format == "json")
    try:
        return _serve(values, terminal)
    except ForedraftError as error:
        terminal.error(str(error))
        return 1
    except KeyboardInterrupt:
        return 130


def make_parser(prog: str = "foredraft serve") -> argparse.ArgumentParser:
    """Returns the parser with the flags of all services, in groups, without those that wire
    them together.
    """
    parser = FlagParser(
        prog=prog,
        usage=f"{prog} [flags]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # Logging stands last in the help, but its fields belong to every service's configuration.
    groups = {title: parser.add_argument_group(title) for title, _ in _GROUPS}
    add_arguments(parser.add_argument_group("logging"), LogConfig, hide_internal=True)
    for title, config in _GROUPS:
        add_arguments(groups[title], config, hide_internal=True)
    return parser


def read_values(namespace: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of ServeConfig that flags or variables set; wiring fields are serve's
    own.

    Raises:
        ConfigError: A value cannot be read.
    """
    internal = {
        field.name for field in dataclasses.fields(ServeConfig) if field.metadata["internal"]
    }
    values = given_values(ServeConfig, namespace)
    return {name: value for name, value in values.items() if name not in internal}


class _OpenEnded(Console):
    """A console whose reader may go: rich would end the thread that writes, and close stdout."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Terminal:
    """Writes to a terminal: services' lines with a coloured name, a progress line, the closing
    table of addresses.

    Args:
        plain: Whether lines are passed on unchanged, for machines.
    """

    def __init__(self, *, plain: bool = False) -> None:
        self._plain = plain
        self._console = _OpenEnded(stderr=True, highlight=False)
        self._started = time.monotonic()

    def line(self, name: str, line: str) -> None:
        """Shows a service's line. Never raises: a closed terminal must not stop a service."""
        try:
            if self._plain:
                print(line, file=sys.stderr, flush=True)
            else:
                prefix = (f"{name:>7} │ ", _COLOURS.get(name.partition("-")[0], ""))
                self._console.print(Text.assemble(prefix, line), soft_wrap=True)
        except OSError:
            return

    def progress(self, what: str) -> Any:
        """Yields `update(text)`, which changes a line under the log; silent where no person
        looks.
        """
        # rich writes a line feed elsewhere, too, which a full disk under a log refuses.
        console = self._console if self._console.is_terminal else Console(quiet=True)
        return console.status(what)

    def starting(self, states: list[ChildState]) -> str:
        """Returns the text of the progress line while services start."""
        marks = "  ".join(f"{state.name} {'✓' if state.healthy else '…'}" for state in states)
        return f"starting: {marks}  ({time.monotonic() - self._started:.0f} s)"

    def ready(self, urls: Mapping[str, str], config: ServeConfig) -> None:
        """Shows the addresses and a first request. Never raises for who reads them, as `line`."""
        seconds = time.monotonic() - self._started
        model = config.served_model_name or Path(config.model_path).name
        if self._plain:
            logger.info("ready after %.1f s", seconds, extra=dict(urls))
            return
        if "http" not in urls:
            _say(f"\nThis host computes for host 0 at {urls['host 0']}. Ctrl-C stops it.\n")
            return
        has_keys = config.api_key or config.api_key_file
        key = " -H 'Authorization: Bearer KEY'" if has_keys else ""
        _say(
            f"\nForedraft serves {model} (ready after {seconds:.1f} s)\n"
            f"  HTTP     {urls['http']}\n"
            f"  try it   {urls['http']}/ (playground), {urls['http']}/dashboard\n"
            f"  gRPC     {urls['grpc']}\n"
            f"  metrics  {' '.join(url for name, url in urls.items() if 'metrics' in name)}\n\n"
            f"  curl {urls['http']}/v1/completions -H 'Content-Type: application/json'{key} \\\n"
            f'    -d \'{{"model": "{model}", "prompt": {json.dumps(FIRST_PROMPT)},'
            ' "max_tokens": 64,'
            ' "temperature": 0}\'\n\n'
            "Ctrl-C stops it.\n"
        )

    def error(self, message: str) -> None:
        """Shows the reason why serve gives up."""
        if self._plain:
            logger.error(message)
        else:
            self._console.print(
                Text(f"foredraft serve: {message}", style="bold red"), soft_wrap=True
            )


def _say(text: str) -> None:
    """Prints a text, with escapes for what the terminal cannot show."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # no stdout, no attribute
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError:
        with open(os.devnull, "w") as sink:  # for what is left of it at the end
            os.dup2(sink.fileno(), sys.stdout.fileno())


def _serve(values: Mapping[str, Any], terminal: Terminal) -> int:
    # Until services run, a signal interrupts whatever is being done.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with terminal.progress("preparing the model"):
        resolved = resolve_models(values)
    supervisor = stack.make_supervisor(resolved, on_line=terminal.line)
    try:
        asked_to_stop = _stop_on_signals(supervisor)
        supervisor.start()
        with terminal.progress("starting") as status:
            supervisor.wait_healthy(
                on_progress=lambda states: status.update(terminal.starting(states)),
                stop=asked_to_stop,
            )
        if not asked_to_stop.is_set():
            terminal.ready(supervisor.urls, ServeConfig(**resolved))
        supervisor.wait(asked_to_stop)
        logger.info("stopping: running requests get time to finish; Ctrl-C again ends them")
    finally:
        supervisor.stop()
    return 0


def _stop_on_signals(supervisor: Supervisor) -> threading.Event:
    """Returns an event that the first SIGINT, SIGTERM or SIGHUP sets; the second kills every
    service.
    """
    event = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        if event.is_set():
            supervisor.kill()
        event.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    return event
