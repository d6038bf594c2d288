"""Alert rules and dashboards name only metrics that the processes really export."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from protocol.exposition import new_registry
from protocol.messages import Limits
from runner.metrics import RunnerMetrics
from scheduler.metrics import Metrics
from services.metrics import ApiMetrics

OPS = Path(__file__).parent.parent.parent / "ops"
RULES = OPS / "prometheus" / "rules.yml"
DASHBOARDS = sorted((OPS / "grafana" / "dashboards").glob("*.json"))
METRIC = re.compile(r"\b(?:triptych_\w+|up)\b")


def series(registry: CollectorRegistry) -> Iterator[str]:
    """Every series name that a registry can export, label values or not."""
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
    for family in registry.collect():
        yield from (family.name + suffix for suffix in suffixes[family.type])


@pytest.fixture(scope="module")
def exported() -> set[str]:
    limits = Limits("m", 16, 10, 128, 100, 8, 64)
    registries = [new_registry(role) for role in ("api", "scheduler", "runner")]
    ApiMetrics(registries[0], "m")
    Metrics(registries[1])
    RunnerMetrics(limits, registries[2])
    return {"up", *(name for registry in registries for name in series(registry))}


def dashboard_expressions(path: Path) -> list[str]:
    panels = json.loads(path.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def rule_expressions() -> list[str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def test_every_metric_in_an_alert_rule_is_exported(exported: set[str]) -> None:
    for expression in rule_expressions():
        names = set(METRIC.findall(expression))
        assert names, expression
        assert names <= exported, f"{names - exported} in {expression}"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_every_metric_in_a_dashboard_is_exported(path: Path, exported: set[str]) -> None:
    expressions = dashboard_expressions(path)
    assert len(expressions) > 10
    for expression in expressions:
        names = set(METRIC.findall(expression))
        assert names, expression
        assert names <= exported, f"{names - exported} in {expression}"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_a_dashboard_has_unique_panel_ids_descriptions_and_the_provisioned_data_source(path: Path) -> None:
    board = json.loads(path.read_text())
    (source,) = yaml.safe_load((OPS / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    for panel in board["panels"]:
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["datasource"]["uid"] == source["uid"]


def test_every_alert_has_a_severity_and_says_what_it_means() -> None:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert len(rule["annotations"]["summary"]) > 20


def test_promtool_accepts_the_configuration_the_rules_and_every_dashboard_expression(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    # Its own place in the container is replaced by the one here.
    config = (OPS / "prometheus" / "prometheus.yml").read_text().replace("/etc/prometheus/rules.yml", str(RULES))
    (tmp_path / "prometheus.yml").write_text(config)
    # As recording rules, dashboard expressions get promtool's syntax check without a server.
    expressions = [e.replace("$__rate_interval", "1m") for path in DASHBOARDS for e in dashboard_expressions(path)]
    rules = [{"record": f"expression:{number}", "expr": expr} for number, expr in enumerate(expressions)]
    (tmp_path / "dashboards.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": rules}]}))
    for arguments in (["config", "prometheus.yml"], ["rules", str(RULES)], ["rules", "dashboards.yml"]):
        done = subprocess.run(
            [promtool, "check", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
