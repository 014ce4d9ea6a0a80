"""Whether another process is gone: known for certain, or not taken for granted."""

import itertools
import os
import resource
import signal
import subprocess
import sys
from contextlib import ExitStack

import pytest

from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.transport.process import Peer, own_identity, pid_namespace, start_time
from testing.segments import num_descriptors


def child() -> tuple["subprocess.Popen[bytes]", tensor_pb2.Process]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = start_time(process.pid)
    assert started is not None
    return process, tensor_pb2.Process(
        pid=process.pid, start_time=started, pid_namespace=pid_namespace()
    )


def test_a_process_is_gone_when_it_was_killed_and_not_when_it_stands_still() -> None:
    process, identity = child()
    peer = Peer(identity)
    assert not peer.is_gone
    process.send_signal(signal.SIGSTOP)
    assert not peer.is_gone
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert peer.is_gone
    assert Peer(identity).is_gone, "found dead"
    process.wait()
    peer.close()
    assert Peer(identity).is_gone


def test_a_later_process_of_the_same_pid_is_another_one() -> None:
    identity = own_identity()
    assert not Peer(identity).is_gone
    identity.start_time -= 1
    assert Peer(identity).is_gone


def test_nothing_is_known_of_a_process_that_cannot_be_seen() -> None:
    identity = own_identity()
    identity.pid_namespace += 1
    assert not Peer(identity).is_gone
    assert not Peer(tensor_pb2.Process()).is_gone
    # A draft may say anything.
    identity = own_identity()
    identity.pid = 2**32 - 1
    assert not Peer(identity).is_gone


def test_watching_costs_no_descriptor_in_the_end() -> None:
    before = num_descriptors("pidfd")
    for _ in range(50):
        peer = Peer(own_identity())
        peer.close()
        peer.close()
    assert num_descriptors("pidfd") == before


def test_nothing_is_known_without_descriptors_and_much_with_many() -> None:
    """Who took a draft for gone because there was no descriptor left would free memory that it
    uses.
    """
    identity = own_identity()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        files = [stack.enter_context(open(os.devnull)) for _ in range(1100)]
        peer = Peer(identity)
        assert peer._descriptor is not None
        assert peer._descriptor > 1023
        assert not peer.is_gone
        peer.close()
        lowest = next(number for number in itertools.count() if not _is_open(number))
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        without = Peer(identity)
        with pytest.raises(OSError, match="Too many open files"):
            start_time(os.getpid())
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert files
        assert not without.is_gone


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
