"""The dashboard asks for metrics and labels that a server exports, and for nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from stageline.engine.stats import StatsCollector
from stageline.server.exposition import engine_families
from stageline.server.http_counters import HttpCounters
from stageline.server.metrics import process_families, ready_families
from tests.unit.stats_examples import MAX_MODEL_LEN, microbatch, read_back, snapshot

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "stageline.json").read_text())
# A metric's name stands before its labels, its window or the end of a term.
NAME = re.compile(r"\b((?:vllm|stageline):\w+|(?:http|process)_\w+)\b")
BY = re.compile(r"\bby \(([^)]*)\)")


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions(panel: dict[str, Any]) -> Iterator[str]:
    for target in panel["targets"]:
        yield target["expr"]


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Sample name to its labels."""
    counters = HttpCounters()
    counters.know([Route("/load", lambda request: None)])
    counters.opened("/load")
    counters.closed("/load", "GET", "200", 0.1)
    stats = snapshot(StatsCollector(MAX_MODEL_LEN, now_s=0.0), (microbatch(1),))
    own = [*ready_families("m", True), *process_families(), *counters.families()]
    families = read_back([*engine_families({0: stats}, "m"), *own])
    return {sample.name: set(sample.labels) for family in families.values() for sample in family.samples}


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_every_panel_shows_metrics_that_are_exported(panel, exported) -> None:
    assert panel["title"] and panel["targets"]
    for expression in expressions(panel):
        names = NAME.findall(expression)
        assert names and set(names) <= set(exported), expression
        labels = {"job", *(label for name in names for label in exported[name])}
        grouped = {label.strip() for found in BY.findall(expression) for label in found.split(",")}
        assert grouped <= labels, expression
        assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_every_legend_names_labels_that_the_expression_leaves(panel) -> None:
    for target in panel["targets"]:
        for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
            groups = BY.findall(target["expr"])
            assert not groups or any(label in group for group in groups), target


def test_panels_do_not_overlap_and_stay_within_the_grid() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not own & cells and all(0 <= x < 24 for x, _ in own), panel["title"]
        cells |= own
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_dashboard_asks_the_job_that_prometheus_collects() -> None:
    configured = (DEPLOY / "prometheus.yml").read_text()
    jobs = {job for panel in panels() for text in expressions(panel) for job in re.findall(r'job="(\w+)"', text)}
    assert jobs == {"stageline"} and all(f"job_name: {job}" in configured for job in jobs)
    assert "metrics_path: /metrics" in configured
