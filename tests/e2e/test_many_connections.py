"""A hundred streams at once: none fails or comes short, and nothing of them stays."""

import urllib.request

import pytest
import uvloop

from testing import many_streams
from testing import stack as stacks
from testing.chaos import processes
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
        pids = {state.name: state.pid for state in stack.states()}

        def left_over() -> list[str]:
            """Services that hold more than before."""
            now = {name: processes.footprint(pid) for name, pid in pids.items() if pid}
            return [
                name
                for name, before in result.before.items()
                if now[name].descriptors > before.descriptors + 4
                or now[name].threads > before.threads + 4
                or now[name].segments != before.segments
            ]

        eventually(lambda: not left_over())
        assert result.peak("gateway") < result.before["gateway"].memory_mib + 64

        def idle() -> bool:
            pages = [
                urllib.request.urlopen(stack.urls[name], timeout=60).read().decode()
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
