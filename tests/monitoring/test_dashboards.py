"""Every query of every dashboard, at a real Prometheus that scrapes the real services under
load.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monitoring import pictures
from monitoring.panels import DASHBOARDS, Dashboard, Panel
from testing import tools
from testing.stack import eventually
from testing.watched_stack import INTERVAL, Prometheus, get_json, watched

PANELS = [panel for dashboard in DASHBOARDS for panel in dashboard.panels]
# These panels stay empty: no alert fires, the engine never idles for its self-test, and there is
# one rank.
SILENT = {"count(ALERTS", "foredraft_draft_self_test", "sum by (rank, part)"}


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    tools.find("prometheus")
    with watched(tmp_path_factory.mktemp("prometheus")) as (_, running):
        yield running


def test_titles_differ_and_say_what_they_show() -> None:
    for dashboard in DASHBOARDS:
        titles = [panel.title for panel in dashboard.panels]
        assert len(set(titles)) == len(titles)
    assert all(panel.help.endswith(".") and panel.queries for panel in PANELS)


def test_panels_use_metrics_that_exist() -> None:
    page = (tools.ROOT / "docs" / "metrics.md").read_text()
    known = set(re.findall(r"^\| `(foredraft_\w+)`", page, re.M))
    for panel in PANELS:
        for query in panel.queries:
            for name in re.findall(r"foredraft_\w+", re.sub(r'"[^"]*"', "", query.expr)):
                assert re.sub(r"_(bucket|sum|count)$", "", name) in known or name in known, name


def test_grafana_finds_every_query_and_only_known_variables() -> None:
    for dashboard in DASHBOARDS:
        path = tools.ROOT / "monitoring/grafana/dashboards" / f"{dashboard.name}.json"
        page = json.loads(path.read_text())
        written = [target["expr"] for panel in page["panels"] for target in panel["targets"]]
        assert written == [query.promql for panel in dashboard.panels for query in panel.queries]
        used = set(re.findall(r"\$(\w+)", " ".join(written)))
        assert used <= {"namespace", "__rate_interval"}
        places = [tuple(panel["gridPos"][key] for key in "xy") for panel in page["panels"]]
        assert len(set(places)) == len(places)


def with_data(prometheus: Prometheus, promql: str) -> list[dict[str, Any]]:
    """Returns a query's result once it has a number; [] before."""
    result = prometheus.query(promql)
    return result if any(math.isfinite(float(series["value"][1])) for series in result) else []


@pytest.mark.slow
@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_every_query_has_data_under_load(prometheus: Prometheus, panel: Panel) -> None:
    for query in panel.queries:
        if any(query.expr.startswith(silent) for silent in SILENT):
            prometheus.query(query.concrete(INTERVAL))
            continue
        result = eventually(lambda query=query: with_data(prometheus, query.concrete(INTERVAL)))
        # A label of the legend is a label of the series.
        for label in re.findall(r"\{\{(\w+)\}\}", query.legend):
            assert all(label in series["metric"] for series in result), query.expr


@pytest.mark.slow
def test_all_is_scraped_and_nothing_fires(prometheus: Prometheus) -> None:
    jobs = {"foredraft-gateway", "foredraft-verifier", "foredraft-draft"}

    def scraped() -> set[str]:
        up = prometheus.query("up")
        return {series["metric"]["job"] for series in up if series["value"][1] == "1"}

    def evaluated() -> list[dict[str, Any]]:
        groups = get_json(f"{prometheus.url}/api/v1/rules")["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return rules if all(rule["health"] == "ok" for rule in rules) else []

    eventually(lambda: scraped() == jobs)
    rules = eventually(evaluated)
    assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == []
    for record in ("foredraft:accept_length:mean30m", "foredraft:kv_usage:ratio"):
        assert eventually(lambda record=record: prometheus.query(record)), record
    length = float(prometheus.query("foredraft:accept_length:mean30m")[0]["value"][1])
    assert 1.0 <= length <= 12.0


@pytest.mark.slow
@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_pictures_are_drawn(prometheus: Prometheus, dashboard: Dashboard, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    pictures.draw(dashboard, prometheus.url, path, seconds=20, interval=INTERVAL)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size < 150_000


def test_pictures_of_the_docs_are_small() -> None:
    for dashboard in DASHBOARDS:
        path = tools.ROOT / "docs" / "images" / f"dashboard-{dashboard.name}.png"
        assert 10_000 < path.stat().st_size < 150_000
