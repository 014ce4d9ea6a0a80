"""The generated modules are what the protos give."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_committed_stubs_are_what_the_protos_give(tmp_path: Path) -> None:
    protos = sorted(map(str, (ROOT / "protos").rglob("*.proto")))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", *outputs, *protos],
        check=True,
    )
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.py*")}
    api = ROOT / "foredraft" / "api"
    committed = {
        path.relative_to(ROOT): path.read_text()
        for path in api.rglob("*.py*")
        if path.suffix in (".py", ".pyi") and path.name != "__init__.py"
    }
    assert made.keys() == committed.keys()
    stale = [str(name) for name in made if made[name] != committed[name]]
    assert not stale, "run `make protos`"
    for folder in {path.parent for path in api.rglob("*_pb2.py")}:
        assert (folder / "__init__.py").exists()
