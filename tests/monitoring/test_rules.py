"""Recording rules and alerts, by promtool's own rule tests, and against the metrics that the code
declares.
"""

import re
import subprocess
import sys

import yaml

from gateway import errors
from testing import tools

RULES = sorted((tools.ROOT / "monitoring" / "rules").glob("*.yml"))


def test_rules_are_valid() -> None:
    tools.run("promtool", "check", "rules", *map(str, RULES))
    tools.run("promtool", "check", "config", "--syntax-only", "monitoring/prometheus.yml")


def test_alerts_fire_when_they_should() -> None:
    assert "SUCCESS" in tools.run("promtool", "test", "rules", "monitoring/tests/alerts.yml")


def test_every_alert_has_a_test_and_a_section_for_the_person_on_call() -> None:
    tests = yaml.safe_load((tools.ROOT / "monitoring" / "tests" / "alerts.yml").read_text())
    cases = [case for test in tests["tests"] for case in test.get("alert_rule_test", ())]
    fired = {case["alertname"] for case in cases if case["exp_alerts"]}
    page = (tools.ROOT / "docs" / "operations.md").read_text()
    for alert in _rules("alert"):
        assert alert["alert"] in fired, f"{alert['alert']} fires in no test"
        assert f"### {alert['alert']}\n" in page
        anchor = f"docs/operations.md#{alert['alert'].lower()}"
        assert alert["annotations"]["runbook_url"] == anchor


def test_rules_use_metrics_that_exist() -> None:
    known = set(
        re.findall(r"^\| `(foredraft_\w+)`", (tools.ROOT / "docs/metrics.md").read_text(), re.M)
    )
    recorded = {rule["record"] for rule in _rules("record")}
    for rule in _rules("record") + _rules("alert"):
        used = set(re.findall(r"foredraft_[a-z0-9_]+", re.sub(r'"[^"]*"', "", rule["expr"])))
        assert used <= known, rule
        assert set(re.findall(r"foredraft:[a-z0-9_:]+", rule["expr"])) <= recorded, rule


def test_what_is_the_servers_fault_counts_as_an_error() -> None:
    ratio = next(r for r in _rules("record") if r["record"] == "foredraft:errors:ratio5m")
    alternatives = re.search(r'outcome=~"([^"]*)"', str(ratio["expr"]))
    assert alternatives is not None
    statuses = {
        label: next((h.status for base, h in errors.HTTP_ERRORS if issubclass(kind, base)), 500)
        for kind, label in errors.OUTCOMES
    }
    # A full queue is the server's, though its 429 looks like a client's.
    faults = {label for label, status in statuses.items() if status >= 500} | {"overloaded"}
    assert set(alternatives.group(1).split("|")) == faults


def test_dashboards_and_kubernetes_rules_are_fresh() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "monitoring.generate", "--check"],
        cwd=tools.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_kubernetes_rules_are_the_same_rules() -> None:
    resource = yaml.safe_load(
        (tools.ROOT / "k8s/components/monitoring/prometheusrule.yaml").read_text()
    )
    assert resource["spec"]["groups"] == [
        group for name in ("recording", "alerts") for group in _groups(name)
    ]


def _groups(name: str) -> list[dict[str, object]]:
    return yaml.safe_load((tools.ROOT / "monitoring" / "rules" / f"{name}.yml").read_text())[
        "groups"
    ]


def _rules(kind: str) -> list[dict[str, object]]:
    names = ("recording", "alerts")
    return [
        rule for name in names for group in _groups(name) for rule in group["rules"] if kind in rule
    ]
