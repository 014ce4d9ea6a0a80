"""A hundred streams at once: none fails or comes short, and nothing of them stays."""

import urllib.request

import pytest
import uvloop

from testing import many_streams
from testing import stack as stacks
from testing.stack import eventually

CONNECTIONS, TOKENS = 100, 24


def test_a_hundred_streams(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    model = stacks.make_model(tmp_path_factory.mktemp("many") / "model")
    with many_streams.running(str(model), CONNECTIONS, TOKENS) as stack:
        uvloop.run(many_streams.run(stack, CONNECTIONS, tokens=4))  # fills pools and caches
        result = uvloop.run(many_streams.run(stack, CONNECTIONS, TOKENS))
        assert result.errors == []
        assert [stream.tokens for stream in result.streams] == [TOKENS] * CONNECTIONS
        for name, before in result.before.items():
            after = result.after[name]
            assert after.descriptors <= before.descriptors + 4, name
            assert after.threads <= before.threads + 4, name
            assert after.segments == before.segments, name
        assert result.peak("gateway") < result.before["gateway"].memory_mib + 64

        def idle() -> bool:
            pages = [
                urllib.request.urlopen(stack.urls[name], timeout=30).read().decode()
                for name in ("verify_metrics", "metrics")
            ]
            return all(
                f"\n{line}\n" in page
                for page, lines in zip(
                    pages,
                    (
                        ("foredraft_kv_pages_used 0.0", "foredraft_running_sequences 0.0"),
                        ("foredraft_gateway_running_requests 0.0",),
                    ),
                    strict=True,
                )
                for line in lines
            )

        eventually(idle)
    ends = [stream.last for stream in result.streams]
    with capsys.disabled():
        print(
            f"\n{CONNECTIONS} streams: {result.microseconds_per_token:.0f} us of the gateway's CPU"
            f" per token, {result.peak('gateway'):.0f} MiB at most; ends after {min(ends):.1f} to"
            f" {max(ends):.1f} s"
        )
