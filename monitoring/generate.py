"""Writes Grafana's dashboards from panels.py, and Kubernetes' PrometheusRule from rules/.

`--check` only compares.

Run from the repository's root: `python -m monitoring.generate`.
"""

import json
import sys
from pathlib import Path
from typing import Any

from monitoring.panels import DASHBOARDS, Dashboard, Panel

HERE = Path(__file__).resolve().parent
WIDTH, HEIGHT, COLUMNS = 8, 8, 3
RULE_FILE = HERE.parent / "k8s" / "components" / "monitoring" / "prometheusrule.yaml"
RULE_HEADER = """\
# Written by `python -m monitoring.generate` from monitoring/rules; edit those instead.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: foredraft
spec:
  groups:
"""


def dashboard_json(dashboard: Dashboard) -> str:
    """The dashboard in Grafana's form (schema 39, Grafana 10 and newer)."""
    page = {
        "uid": f"foredraft-{dashboard.name}",
        "title": dashboard.title,
        "tags": ["foredraft"],
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables()},
        "panels": [_panel(panel, index) for index, panel in enumerate(dashboard.panels)],
    }
    return json.dumps(page, indent=1) + "\n"


def prometheus_rule() -> str:
    """The rule files as one resource of the Prometheus operator."""
    groups = []
    for name in ("recording", "alerts"):
        text = (HERE / "rules" / f"{name}.yml").read_text()
        groups.append(text.partition("groups:\n")[2])
    lines = "".join(groups).splitlines()
    return RULE_HEADER + "".join(f"  {line}\n" if line else "\n" for line in lines)


def outputs() -> dict[Path, str]:
    """Every written file and its text."""
    folder = HERE / "grafana" / "dashboards"
    files = {folder / f"{one.name}.json": dashboard_json(one) for one in DASHBOARDS}
    return {**files, RULE_FILE: prometheus_rule()}


def _variables() -> list[dict[str, Any]]:
    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {
            "name": "namespace",
            "type": "query",
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "definition": "label_values(foredraft_build_info, namespace)",
            "query": {"query": "label_values(foredraft_build_info, namespace)", "refId": "names"},
            "refresh": 2,
            "includeAll": True,
            # Matches also what has no such label, as under Docker Compose.
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def _panel(panel: Panel, index: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    options: dict[str, Any] = {"legend": {"displayMode": "list", "placement": "bottom"}}
    if panel.kind == "heatmap":
        options = {"calculate": False, "yAxis": {"unit": "short"}}
    return {
        "id": index + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": source,
        "gridPos": {
            "x": index % COLUMNS * WIDTH,
            "y": index // COLUMNS * HEIGHT,
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": source,
                "expr": query.promql,
                "legendFormat": query.legend,
                "format": "heatmap" if panel.kind == "heatmap" else "time_series",
            }
            for number, query in enumerate(panel.queries)
        ],
    }


def main(argv: list[str]) -> int:
    """Returns 1 when a file was stale under --check."""
    stale = [
        path for path, text in outputs().items() if not path.is_file() or path.read_text() != text
    ]
    if "--check" in argv:
        for path in stale:
            print(
                f"stale: {path.relative_to(HERE.parent)}; run python -m monitoring.generate",
                file=sys.stderr,
            )
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(outputs()[path])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
