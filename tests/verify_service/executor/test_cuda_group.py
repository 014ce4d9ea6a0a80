"""What ranks on GPUs find out before they connect, which needs no GPU."""

from verify_service.executor.ranks.cuda_group import interface_of


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None
    assert interface_of("::1") is None
