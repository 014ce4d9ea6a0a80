"""Fetching by name, against a server on this machine that answers as a Hugging Face hub does."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from draft_service.models.shared_weights import read_token_map
from foredraft.errors import CheckpointError
from foredraft.models import hub
from foredraft.models.registry import resolve_model_path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "89abcdef0123456789abcdef0123456789abcdef"
WEIGHTS = bytes(range(256)) * 2000


def git_sha(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Hub(ThreadingHTTPServer):
    """A hub with a repository `org/tiny`, which has two commits.

    Attributes:
        files: Contents by commit and name.
        requests: (method, path, Range header) of every request.
        cut_after: The next answer with weights breaks off after so many bytes; None lets it
            through.
        broken: Files that cannot be had now.
        is_down: Whether connections are closed without an answer.
        serve_instead: Contents that are served, under the checksums of the right ones.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        small = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}"}
        unwanted = {"modeling_tiny.py": b"raise SystemExit", "pytorch_model.bin": b"pickle"}
        unwanted |= {"onnx/config.json": b"{}", "consolidated.safetensors": WEIGHTS}
        self.files = {
            COMMIT: {**small, **unwanted, "model.safetensors": WEIGHTS},
            OLDER: {**small, "config.json": b"{}", "model.safetensors": WEIGHTS[::-1]},
        }
        self.requests: list[tuple[str, str, str]] = []
        self.cut_after: int | None = None
        self.broken: set[str] = set()
        self.is_down = False
        self.serve_instead: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fetched(self, name: str) -> list[str]:
        """The Range headers of the GETs of a file."""
        return [
            span
            for method, path, span in self.requests
            if method == "GET" and path.endswith(f"/{name}")
        ]


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """No lines on the test's output."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        span = self.headers.get("Range", "")
        self.server.requests.append((self.command, path, span))
        if self.server.is_down:
            self.close_connection = True
            return
        parts = path.strip("/").split("/")
        if parts[:4] == ["api", "models", "org", "tiny"]:
            self._api(parts[4:])
        elif parts[:3] == ["org", "tiny", "resolve"]:
            self._file(parts[3], "/".join(parts[4:]), span, with_body)
        else:
            self._refuse("RepoNotFound")

    def _commit(self, revision: str) -> str | None:
        commit = {"main": COMMIT, "v1": OLDER}.get(revision, revision)
        return commit if commit in self.server.files else None

    def _api(self, rest: list[str]) -> None:
        revision = rest[1] if len(rest) > 1 else "main"
        commit = self._commit(revision)
        if commit is None:
            self._refuse("RevisionNotFound")
            return
        files = self.server.files[commit]
        if rest[:1] == ["tree"]:
            body: object = [_entry(name, content) for name, content in files.items()]
        else:
            siblings = [{"rfilename": name} for name in files]
            body = {"id": "org/tiny", "modelId": "org/tiny", "sha": commit, "siblings": siblings}
            body |= {"private": False, "tags": [], "downloads": 0}
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"}, True)

    def _file(self, revision: str, name: str, span: str, with_body: bool) -> None:
        commit = self._commit(revision)
        if commit is None:
            self._refuse("RevisionNotFound")
            return
        if name not in self.server.files[commit]:
            self._refuse("EntryNotFound")
            return
        content = self.server.files[commit][name]
        headers = {
            "X-Repo-Commit": commit,
            "ETag": f'"{git_sha(content)}"',
            "Accept-Ranges": "bytes",
        }
        if name.endswith(".safetensors"):
            headers |= {
                "ETag": '"not-the-checksum"',
                "X-Linked-ETag": f'"{hashlib.sha256(content).hexdigest()}"',
                "X-Linked-Size": str(len(content)),
            }
        content = self.server.serve_instead.get(name, content)
        status, start = 200, 0
        if span:
            start = int(span.removeprefix("bytes=").partition("-")[0])
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if with_body and name in self.server.broken:
            self._send(500, b"", {}, with_body)
            return
        self._send(status, content[start:], headers, with_body)

    def _refuse(self, code: str) -> None:
        self._send(404, b"", {"X-Error-Code": code, "X-Error-Message": code}, True)

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if not with_body:
            return
        cut = self.server.cut_after
        if cut is not None and len(body) > cut:
            self.server.cut_after = None
            self.wfile.write(body[:cut])
            self.wfile.flush()
            self.close_connection = True
            return
        self.wfile.write(body)


def _entry(name: str, content: bytes) -> dict[str, object]:
    entry: dict[str, object] = {
        "type": "file",
        "path": name,
        "size": len(content),
        "oid": git_sha(content),
    }
    if name.endswith(".safetensors"):
        entry["lfs"] = {
            "oid": hashlib.sha256(content).hexdigest(),
            "size": len(content),
            "pointerSize": 134,
        }
    return entry


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        # The library reads its variables when it is imported; a service's process has them from its
        # start.
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server
        server.shutdown()
        thread.join()


def test_a_head_without_safetensors_comes_as_bin(server: Hub) -> None:
    del server.files[COMMIT]["model.safetensors"]
    with pytest.raises(CheckpointError, match="no safetensors files"):
        resolve_model_path("org/tiny")
    assert server.fetched("pytorch_model.bin") == []
    found = resolve_model_path("org/tiny", bins=True)
    assert (found / "pytorch_model.bin").read_bytes() == b"pickle"
    server.is_down = True
    assert resolve_model_path("org/tiny", bins=True) == found
    server.is_down = False
    del server.files[OLDER]["model.safetensors"]
    with pytest.raises(CheckpointError, match=r"neither safetensors files nor pytorch_model\.bin"):
        resolve_model_path("org/tiny", OLDER, bins=True)


def test_a_token_map_is_fetched_alone(server: Hub, tmp_path: Path) -> None:
    torch.save([5, 3, 9], tmp_path / "map.pt")
    server.files[COMMIT]["freq_3.pt"] = (tmp_path / "map.pt").read_bytes()
    assert read_token_map("org/tiny/freq_3.pt", 16).tolist() == [5, 3, 9]
    server.is_down = True
    assert read_token_map("org/tiny/freq_3.pt", 16).tolist() == [5, 3, 9]
    server.is_down = False
    assert not server.fetched("config.json")
    with pytest.raises(CheckpointError, match=r"org/tiny has no file freq_4\.pt"):
        read_token_map("org/tiny/freq_4.pt", 16)
    with pytest.raises(CheckpointError, match="No such file"):
        read_token_map("a/path/to/nothing.pt", 16)


def test_a_model_is_fetched_once_and_nothing_else_with_it(server: Hub) -> None:
    found = resolve_model_path("org/tiny")
    assert found.name == COMMIT
    names = {path.name for path in found.iterdir()}
    assert names == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (found / "model.safetensors").read_bytes() == WEIGHTS
    assert resolve_model_path("org/tiny") == found
    assert len(server.fetched("model.safetensors")) == 1
    assert not server.fetched("modeling_tiny.py")


def test_a_revision_is_pinned(server: Hub) -> None:
    assert resolve_model_path("org/tiny", "v1").name == OLDER
    pinned = resolve_model_path("org/tiny", OLDER)
    assert (pinned / "model.safetensors").read_bytes() == WEIGHTS[::-1]
    with pytest.raises(CheckpointError, match=r"org/tiny at v9: .* cannot be fetched"):
        resolve_model_path("org/tiny", "v9")


def test_a_cut_connection_resumes(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of these the library writes whole ones only.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    server.cut_after = 100_000
    found = resolve_model_path("org/tiny")
    assert (found / "model.safetensors").read_bytes() == WEIGHTS
    first, second = server.fetched("model.safetensors")
    assert first == ""
    assert second == "bytes=100000-"


def test_a_later_start_fetches_only_what_is_not_whole(server: Hub) -> None:
    del server.files[COMMIT]["model.safetensors"]
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    server.files[COMMIT] |= dict(zip(shards, (WEIGHTS, WEIGHTS[::-1]), strict=True))
    server.broken = {shards[1]}
    with pytest.raises(CheckpointError, match=r"org/tiny: .* cannot be fetched"):
        resolve_model_path("org/tiny")
    server.broken = set()
    found = resolve_model_path("org/tiny")
    assert (found / shards[1]).read_bytes() == WEIGHTS[::-1]
    assert len(server.fetched(shards[0])) == 1


@pytest.mark.parametrize(
    ("name", "content"), [("model.safetensors", WEIGHTS[:-1] + b"!"), ("tokenizer.json", b"[]")]
)
def test_a_wrong_file_is_refused_and_fetched_again(server: Hub, name: str, content: bytes) -> None:
    right = server.files[COMMIT][name]
    assert len(content) == len(right)
    server.serve_instead = {name: content}
    with pytest.raises(CheckpointError, match=rf"{name} is not what the hub says"):
        resolve_model_path("org/tiny")
    server.serve_instead = {}
    assert (resolve_model_path("org/tiny") / name).read_bytes() == right
    assert len(server.fetched(name)) == 2


def test_a_file_that_changed_on_disk_is_refused(server: Hub) -> None:
    found = resolve_model_path("org/tiny")
    blob = (found / "model.safetensors").resolve()
    blob.write_bytes(b"?" + WEIGHTS[1:])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not what the hub says"):
        resolve_model_path("org/tiny")


def test_offline_what_is_here_is_enough(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    found = resolve_model_path("org/tiny")
    asked = len(server.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model_path("org/tiny") == found
    assert resolve_model_path("org/tiny", COMMIT) == found
    with pytest.raises(CheckpointError, match="cannot be fetched"):
        resolve_model_path("org/tiny", OLDER)
    assert len(server.requests) == asked


def test_an_unreachable_hub_is_no_trouble_once_the_model_is_here(server: Hub) -> None:
    found = resolve_model_path("org/tiny")
    server.is_down = True
    assert resolve_model_path("org/tiny") == found
    assert resolve_model_path("org/tiny", COMMIT) == found


def test_what_does_not_exist_is_told(server: Hub) -> None:
    with pytest.raises(CheckpointError, match=r"org/other: .* cannot be fetched"):
        resolve_model_path("org/other")
    del server.files[COMMIT]["model.safetensors"]
    with pytest.raises(CheckpointError, match="no safetensors files"):
        resolve_model_path("org/tiny")


def test_a_local_directory_wins_over_a_name(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tmp_path / "org" / "tiny"
    local.mkdir(parents=True)
    (local / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model_path("org/tiny") == Path("org/tiny")
    with pytest.raises(CheckpointError, match="--revision"):
        resolve_model_path("org/tiny", "v1")
    assert not server.requests


@pytest.mark.parametrize("path", ["/a/b", "./a/b", "a/b/c", "~/a", "a", "a/b\n", "../a", "a/.b"])
def test_paths_are_no_names(path: str) -> None:
    assert not hub.is_repository(path)


def test_a_gateway_elsewhere_fetches_the_tokenizer_alone(server: Hub, tmp_path: Path) -> None:
    theirs = f"/cache/huggingface/hub/models--org--tiny/snapshots/{OLDER}"
    ours = Path(hub.tokenizer_directory(theirs))
    assert ours.name == OLDER
    assert {path.name for path in ours.iterdir()} == {"config.json", "tokenizer.json"}
    assert hub.tokenizer_directory(str(tmp_path)) == str(tmp_path)
    assert hub.tokenizer_directory("/no/such/path") == "/no/such/path"
    assert not server.fetched("model.safetensors")
    # The model itself, later, brings the rest.
    assert (hub.fetch("org/tiny", OLDER) / "model.safetensors").is_file()
