"""What `foredraft bench` says of servers that do not tell their model, and of keys for them."""

import pytest

from foredraft.cli import bench
from testing.peer_server import PeerServer


def serve(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = bench.main(["serve", "--disable-tqdm", *argv])
    caught = capsys.readouterr()
    return code, caught.out + caught.err


def test_a_server_with_a_key_says_how_to_give_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with PeerServer(0.0, 0.0).running() as peer:
        peer.key = "sesame"
        argv = ["--base-url", peer.url, "--num-prompts", "2", "--output-len", "1"]
        code, text = serve(capsys, *argv)
        assert code == 2
        assert "/v1/models answers 401: a key is needed; put a key into OPENAI_API_KEY" in text
        assert "--header 'Authorization=Bearer KEY'" in text
        assert serve(capsys, *argv, "--header", "Authorization=Bearer sesame")[0] == 0
        monkeypatch.setenv("OPENAI_API_KEY", "sesame")
        assert serve(capsys, *argv)[0] == 0
        assert bench.main(["speculative", "--base-url", peer.url]) == 2
        assert "not a Foredraft server" in capsys.readouterr().err, "it sends the key too"


def test_a_server_without_a_list_of_models_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    with PeerServer().running() as peer:
        code, text = serve(capsys, "--base-url", peer.url + "/elsewhere")
    assert code == 2
    assert 'answers 404: {"detail":"Not Found"}; give --model' in text


@pytest.mark.parametrize(
    "key", ["my\nsecret", "my\r\nX-Other: secret", "my secret", "mysecretключ"]
)
def test_a_key_that_no_header_holds_is_refused_and_not_shown(
    key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    code, text = serve(capsys)
    assert code == 2
    assert "OPENAI_API_KEY: a key has printable ASCII characters, no spaces" in text
    monkeypatch.delenv("OPENAI_API_KEY")
    code, more = serve(capsys, "--header", f"Authorization: {key}")
    assert code == 2
    assert "secret" not in text + more
