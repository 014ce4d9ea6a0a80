"""A real stack under load with a real Prometheus that scrapes it.

Also a program, which draws the dashboards' pictures:

python -m testing.watched_stack --seconds 300 --output docs/images
"""

import argparse
import contextlib
import itertools
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foredraft.cli import serve_config, stack
from foredraft.cli.supervisor import Supervisor
from monitoring import pictures
from monitoring.panels import DASHBOARDS
from testing import tools
from testing.forked import forked
from testing.stack import free_port

# Long enough that its pages are shared between requests.
PREAMBLE = " ".join(
    f"Rule {number}: answer briefly, in plain words, and say what you do not know."
    for number in range(6)
)
PROMPTS = (
    f"{PREAMBLE}\nThe capital of France is",
    f"{PREAMBLE}\nThe capital of Italy is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "To be, or not to be, that is the question:",
    "One two three four one two three four one two three",
)
INTERVAL = "10s"  # value of Grafana's $__rate_interval


class Prometheus:
    """A running Prometheus with this repository's rules."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, promql: str) -> list[dict[str, Any]]:
        """Returns the result of an instant query."""
        fields = urllib.parse.urlencode({"query": promql})
        answer = get_json(f"{self.url}/api/v1/query?{fields}")
        assert answer["status"] == "success"
        return answer["data"]["result"]


def get_json(url: str) -> Any:
    """Returns a page's JSON."""
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)


def complete(base: str, prompt: str, max_tokens: int, temperature: float) -> dict[str, Any]:
    """Returns one answer of /v1/completions."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature}
    request = urllib.request.Request(
        f"{base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


@contextlib.contextmanager
def running_stack() -> Iterator[Supervisor]:
    """Runs the bundled model, drafted from n-grams, in a small pool of pages."""
    values = serve_config.resolve_models({})
    values |= {"port": 0, "grpc_port": 0, "num_threads": 1, "max_total_tokens": 4096}
    lines: list[str] = []
    supervisor = stack.make_supervisor(values, on_line=lambda name, line: lines.append(line))
    supervisor.launch = forked
    with supervisor:
        supervisor.wait_healthy(timeout=120)
        yield supervisor


@contextlib.contextmanager
def running_prometheus(directory: Path, urls: dict[str, str]) -> Iterator[Prometheus]:
    """Runs Prometheus with the repository's rules, scraping `urls` (job to URL of /metrics)
    every second.
    """
    jobs = [
        {
            "job_name": job,
            "static_configs": [{"targets": [urllib.parse.urlsplit(url).netloc]}],
        }
        for job, url in urls.items()
    ]
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(tools.ROOT / "monitoring" / "rules" / "*.yml")],
        "scrape_configs": jobs,
    }
    # JSON is YAML.
    (directory / "prometheus.yml").write_text(json.dumps(config))
    port = free_port()
    command = [
        tools.find("prometheus"),
        f"--config.file={directory}/prometheus.yml",
        f"--storage.tsdb.path={directory}/data",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(f"{url}/-/ready", process)
        yield Prometheus(url)
    finally:
        process.terminate()
        process.wait(20)


@contextlib.contextmanager
def load(base: str, clients: int = 3, pause: float = 0.05) -> Iterator[None]:
    """Runs clients that send one request after another until the block ends; a failed answer
    ends the test.
    """
    stop, errors = threading.Event(), []

    def client(seed: int) -> None:
        choose = random.Random(seed)
        for number in itertools.count():
            if stop.is_set():
                return
            try:
                complete(
                    base,
                    PROMPTS[(number + seed) % len(PROMPTS)],
                    choose.choice((8, 24, 48)),
                    choose.choice((0.0, 0.0, 0.7)),
                )
            except OSError as error:
                errors.append(error)
                return
            stop.wait(pause)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors, errors


@contextlib.contextmanager
def watched(directory: Path) -> Iterator[tuple[Supervisor, Prometheus]]:
    """Runs both, and load on them, until the block ends."""
    with running_stack() as supervisor:
        urls = {
            "foredraft-gateway": supervisor.urls["metrics"],
            "foredraft-verifier": supervisor.urls["verify_metrics"],
            "foredraft-draft": supervisor.urls["draft_metrics"],
        }
        with (
            running_prometheus(directory, urls) as prometheus,
            load(supervisor.urls["http"]),
        ):
            yield supervisor, prometheus


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        assert process.poll() is None, "Prometheus ended"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):
            return
        time.sleep(0.1)
    raise TimeoutError(url)


def main() -> int:
    """Draws the pictures of docs/."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--output", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, watched(Path(name)) as (_, prometheus):
        time.sleep(arguments.seconds + 12)
        for dashboard in DASHBOARDS:
            path = arguments.output / f"dashboard-{dashboard.name}.png"
            pictures.draw(
                dashboard, prometheus.url, path, seconds=arguments.seconds, interval=INTERVAL
            )
            print(path, path.stat().st_size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
