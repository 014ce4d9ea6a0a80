"""Counting of verifications against a plain count."""

import random

from foredraft.telemetry.metrics import value
from verify_service.metrics import SeveralMetrics, SpeculationMetrics, speculation_metrics


def test_verifications_are_counted_once_a_step() -> None:
    algorithm = "COUNTED"
    metrics = SpeculationMetrics(algorithm)
    choose = random.Random(0)
    generated = value("foredraft_generation_tokens_total")
    seen = []
    for _ in range(20):
        for _ in range(choose.randrange(5)):
            num_nodes = choose.randrange(6)
            num_accepted = choose.randint(0, num_nodes)
            metrics.verified(num_nodes, num_accepted, num_nodes == 3)
            metrics.generated(num_accepted + 1)
            metrics.turned_off(not num_nodes)
            seen.append((num_nodes, num_accepted))
        metrics.flush()
    metrics.flush()

    def counted(name: str, **labels: str) -> float:
        return value(f"foredraft_{name}", algorithm=algorithm, **labels)

    trees = [(nodes, accepted) for nodes, accepted in seen if nodes]
    assert counted("verifies_total") == counted("accept_length_tokens_count") == len(seen)
    assert counted("emitted_tokens_total") == sum(accepted + 1 for _, accepted in seen)
    assert counted("accept_length_tokens_sum") == counted("emitted_tokens_total")
    assert value("foredraft_generation_tokens_total") - generated == counted("emitted_tokens_total")
    assert counted("drafts_total") == len(trees)
    assert counted("draft_tokens_total") == sum(nodes for nodes, _ in trees)
    assert counted("accepted_tokens_total") == sum(accepted for _, accepted in trees)
    assert counted("speculation_off_verifies_total") == len(seen) - len(trees)
    assert counted("lossy_verifies_total") == sum(nodes == 3 for nodes, _ in seen)
    for depth in range(5):
        reached = sum(accepted > depth for _, accepted in trees)
        position = {"position": str(depth)}
        assert counted("accepted_tokens_per_position_total", **position) == reached
        # A bucket holds what is at most its bound.
        short = sum(accepted + 1 <= depth + 1 for _, accepted in seen)
        assert counted("accept_length_tokens_bucket", le=f"{depth + 1}.0") == short


def test_plain_decoding_is_counted_as_one_token_each() -> None:
    metrics = SpeculationMetrics("PLAIN")
    generated = value("foredraft_generation_tokens_total")
    for num_tokens in (3, 0, 2):
        metrics.decoded(num_tokens)
        metrics.flush()
    assert value("foredraft_generation_tokens_total") == generated + 5
    for name in ("verifies_total", "emitted_tokens_total", "accept_length_tokens_sum"):
        assert value(f"foredraft_{name}", algorithm="PLAIN") == 5
    assert value("foredraft_drafts_total", algorithm="PLAIN") == 0


def test_each_of_several_drafts_is_counted_for_itself() -> None:
    metrics = speculation_metrics(["ONE", "TWO"])
    assert isinstance(metrics, SeveralMetrics)
    generated = value("foredraft_generation_tokens_total")
    metrics.of("ONE").verified(4, 1, is_lossy=False)
    metrics.of("TWO").verified(6, 3, is_lossy=True)
    metrics.generated(6)
    metrics.flush()
    metrics.flush()
    found = {
        name: (
            value(f"foredraft_{name}_total", algorithm="ONE"),
            value(f"foredraft_{name}_total", algorithm="TWO"),
        )
        for name in (
            "drafts",
            "draft_tokens",
            "accepted_tokens",
            "emitted_tokens",
            "lossy_verifies",
        )
    }
    assert found == {
        "drafts": (1, 1),
        "draft_tokens": (4, 6),
        "accepted_tokens": (1, 3),
        "emitted_tokens": (2, 4),
        "lossy_verifies": (0, 1),
    }
    assert value("foredraft_generation_tokens_total") == generated + 6
