"""Servers that `foredraft bench speculative` measures: services of its own for each setting, or
one running server.
"""

import argparse
import contextlib
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import uvloop

from foredraft.bench import peers, sweep
from foredraft.bench.http_client import HttpClient
from foredraft.bench.sweep import Setting
from foredraft.cli import serve, serve_config, stack
from foredraft.config.algorithms import ALGORITHMS
from foredraft.config.options import flag_of
from foredraft.errors import CheckpointError, ConfigError, ForedraftError
from foredraft.models.registry import BUNDLED_DRAFTS, resolve_model_path

_START_SECONDS = 600.0
_ATTACH_SECONDS = 60.0


class StartedServers:
    """Starts services for each setting."""

    fields = False  # settings are flags, not fields of requests
    headers: Mapping[str, str] = {}  # they ask for no key

    def __init__(self, arguments: argparse.Namespace) -> None:
        given = serve.read_values(serve.make_parser().parse_args(arguments.serve_flags))
        for name in given:
            if name.startswith("speculative_") and name in Setting("NONE", "-", 1, 1, 1).values:
                raise ConfigError(f"{flag_of(name)} behind --: that is what is searched")
        quiet = {"port": 0, "grpc_port": 0, "log_level": "warning", "skip_draft_self_test": True}
        self._values = {**quiet, "model_path": arguments.model_path, **given}
        self.model = Path(self._values["model_path"]).name
        self.flags = " ".join([f"--model-path {arguments.model_path}", *arguments.serve_flags])
        self.given = given

    def settings(self, arguments: argparse.Namespace) -> list[Setting]:
        """Returns the grid of the flags.

        Raises:
            ConfigError: A flag is wrong, an algorithm that was asked for cannot be served, or a
                draft cannot be had.
        """
        drafts = dict(
            BUNDLED_DRAFTS if self.model == "foredraft-demo" and not arguments.draft else {}
        )
        for pair in arguments.draft:
            algorithm, separator, path = pair.partition("=")
            if algorithm not in ALGORITHMS or not separator or not path:
                raise ConfigError(f"--draft {pair}: not ALGORITHM=PATH")
            drafts[algorithm] = path
        wanted = arguments.algorithm or ["NGRAM", *drafts]
        found = sweep.grid(
            {name: drafts.get(name, "") for name in wanted},
            arguments.steps,
            arguments.topk,
            arguments.num_draft_tokens,
        )
        for name in arguments.algorithm or ():
            if not any(setting.algorithm == name for setting in found):
                remedy = "" if name in drafts else f"; name its model with --draft {name}=PATH"
                raise ConfigError(
                    f"--algorithm {name}: no tree of these sizes can be served{remedy}"
                )
        for name, path in {one.algorithm: one.draft for one in found if one.draft}.items():
            try:
                resolve_model_path(path, bins=ALGORITHMS[name].reads_hidden)
            except CheckpointError as error:
                raise ConfigError(f"--draft {name}: {error}") from None
        return found

    @contextlib.contextmanager
    def open(self, setting: Setting) -> Iterator[str]:
        """Starts services, waits until the draft is attached, stops them."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        resolved = serve_config.resolve_models({**self._values, **setting.values})
        with stack.make_supervisor(resolved) as supervisor:
            supervisor.wait_healthy(timeout=_START_SECONDS)
            url = supervisor.urls["http"]
            if setting.algorithm != "NONE":
                _wait_for_draft(url, self.headers)
            yield url


class RunningServer:
    """Uses a running server; fields of requests make its trees smaller."""

    fields = True

    def __init__(self, url: str) -> None:
        url = url.rstrip("/").removesuffix("/v1")  # OpenAI's clients are given the address with it
        self._url = url
        self.headers = peers.key_header()
        info = uvloop.run(_server_info(url, self.headers))
        if "speculative_algorithm" not in info or "verifiers" not in info:
            raise ConfigError(
                f"--base-url {url}: not a Foredraft server; bench serve can load others"
            )
        self._info = info
        self.model = str(info["served_model_name"])
        self.flags = f"--model-path {info['model_path']}"
        self.given = {"server": url}

    def settings(self, arguments: argparse.Namespace) -> list[Setting]:
        """Returns the server's own setting, and the grid's settings within its limits."""
        info = self._info
        algorithm, draft = info["speculative_algorithm"], info["speculative_draft_model_path"] or ""
        if algorithm == "NONE":
            raise ConfigError(f"--base-url {self._url}: the server was started without speculation")
        if arguments.draft or arguments.serve_flags:
            raise ConfigError(
                "--base-url starts no services: --draft and flags behind -- have no use"
            )
        if "," in algorithm or algorithm not in (arguments.algorithm or [algorithm]):
            raise ConfigError(
                f"--base-url {self._url}: the server drafts by {algorithm}, and what is compared is"
                " one algorithm, the server's; without --base-url each gets services of its own"
            )
        limits = (
            info["speculative_num_steps"],
            info["speculative_eagle_topk"],
            info["speculative_num_draft_tokens"],
        )
        own = Setting(algorithm, draft, *limits)
        if algorithm == "NGRAM":
            own = Setting(algorithm, num_draft_tokens=limits[2])
        trees = sweep.grid(
            {algorithm: draft}, arguments.steps, arguments.topk, arguments.num_draft_tokens
        )
        smaller = [
            setting
            for setting in trees
            if setting != own
            and all(
                number is None or number <= limit
                for number, limit in zip(
                    (setting.num_steps, setting.topk, setting.num_draft_tokens), limits, strict=True
                )
            )
        ]
        return [*smaller, own]

    @contextlib.contextmanager
    def open(self, setting: Setting) -> Iterator[str]:
        """Yields the URL; the server runs already."""
        yield self._url


Servers = StartedServers | RunningServer


async def _server_info(url: str, headers: Mapping[str, str]) -> dict[str, Any]:
    client = HttpClient(url, headers)
    try:
        await peers.discover(client, "openai")
        response = await client.get("/get_server_info")
        return dict(response.json()) if response.status == 200 else {}
    except ValueError:
        return {}
    finally:
        client.close()


def _wait_for_draft(url: str, headers: Mapping[str, str]) -> None:
    deadline = time.monotonic() + _ATTACH_SECONDS
    while time.monotonic() < deadline:
        loads = uvloop.run(_server_info(url, headers)).get("verifiers", {}).values()
        if any(load["draft_available"] for load in loads):
            return
        time.sleep(0.2)
    raise ForedraftError(f"no draft was attached within {_ATTACH_SECONDS:g} s")
