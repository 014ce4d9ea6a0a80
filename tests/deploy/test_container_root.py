"""The services as our containers run them: another user, no capabilities, nothing to write to but
three folders.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from testing import tools
from testing.dockerfile import stages
from testing.stack import free_port

SCRIPT = tools.ROOT / "testing" / "container_root.sh"

# Runs inside: what docker-compose.yml starts, one request, and an orderly end.
INSIDE = """
import json, os, pathlib, subprocess, sys, time, urllib.request
from testing.ready import wait_ready

for folder in ("/", "/root", "/usr"):
    try:
        pathlib.Path(folder, "written").write_text("x")
    except OSError:
        continue
    sys.exit(f"{folder} can be written to")
sockets = "unix:/run/foredraft"
commands = {
    "gateway": ["--port=0", "--grpc-port=0", f"--verifier={sockets}/verify.sock"],
    "verify_service": [f"--listen={sockets}/verify.sock", f"--draft={sockets}/draft.sock",
                       "--metrics-port=0", "--num-threads=1", "--max-total-tokens=2048"],
    "draft_service": [f"--listen={sockets}/draft.sock", "--metrics-port=0"],
}
ports = json.loads(os.environ["PORTS"])
commands["gateway"][:2] = [f"--port={ports[0]}", f"--grpc-port={ports[1]}"]
running = [subprocess.Popen([sys.executable, "-m", name, *flags]) for name, flags in commands.items()]
for address in (f"{sockets}/draft.sock", f"{sockets}/verify.sock", f"127.0.0.1:{ports[1]}"):
    wait_ready(address, 240)
body = json.dumps({"prompt": "The capital of France is", "max_tokens": 8, "ignore_eos": True}).encode()
request = urllib.request.Request(f"http://127.0.0.1:{ports[0]}/v1/completions", body,
                                 {"Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(request, timeout=60))
codes = []
for process in running:
    process.terminate()
    codes.append(process.wait(40))
print(json.dumps({"uid": os.getuid(), "usage": answer["usage"], "codes": codes,
                  "left": os.listdir("/run/foredraft")}))
"""  # noqa: E501


def _runtime_environment() -> dict[str, str]:
    """The ENV of the images, but for the PATH of their environment."""
    words = " ".join(
        rest for name in ("base", "runtime") for key, rest in _steps(name) if key == "ENV"
    )
    found = dict(re.findall(r"(\w+)=(\S+)", words))
    return {**found, "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}


def _steps(stage: str) -> list[tuple[str, str]]:
    return stages(tools.ROOT / "Dockerfile")[stage].steps


@pytest.mark.slow
def test_services_need_no_root_and_write_nowhere_else() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can make a mount namespace here")
    if tools.ROOT.is_relative_to("/tmp"):
        pytest.skip("the namespace has a /tmp of its own, which hides this checkout")
    probe = subprocess.run(["unshare", "--mount", "mount", "--make-rprivate", "/"], check=False)
    if probe.returncode != 0:
        pytest.skip("mount namespaces cannot be had here")
    environment = _runtime_environment()
    assert environment["XDG_CACHE_HOME"] == "/cache"
    assert environment["XDG_RUNTIME_DIR"] == "/run/foredraft"
    environment |= {"PYTHONPATH": str(tools.ROOT), "PORTS": json.dumps([free_port(), free_port()])}
    visible = dict.fromkeys(map(str, (tools.ROOT, Path(sys.prefix), Path(sys.base_prefix))))
    made = [path for path in (Path("/cache"), Path("/run/foredraft")) if not path.exists()]
    result = subprocess.run(
        ["unshare", "--mount", str(SCRIPT), *visible, "--", sys.executable, "-c", INSIDE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=840,
    )
    # Where the namespace was mounted; nothing was written there.
    for path in made:
        path.rmdir()
    assert result.returncode == 0, result.stderr[-4000:]
    said = json.loads(result.stdout.splitlines()[-1])
    assert said["uid"] == 10001
    assert said["usage"]["completion_tokens"] == 8
    assert said["codes"] == [0, 0, 0]
    assert said["left"] == []
