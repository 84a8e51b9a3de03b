"""The manifest of deploy/ fits this package: commands parse, ports and labels lead somewhere, nothing is open."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
import yaml

from stageline.cli.main import build_parser
from stageline.config.cluster_config import DEFAULT_CLUSTER_PORT
from stageline.config.flags import cluster_config_from_args, engine_config_from_args, serve_config_from_args
from stageline.config.serve_config import ServeConfig
from tests.architecture.source_tree import ROOT

DEPLOY = ROOT / "deploy"
POD_IP = "10.1.2.3"


def objects(kind: str) -> dict[str, Any]:
    found = yaml.safe_load_all((DEPLOY / "kubernetes.yml").read_text())
    return {one["metadata"]["name"]: one for one in found if one["kind"] == kind}


def pod(name: str) -> dict[str, Any]:
    spec = objects("StatefulSet")[name]["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def container(name: str) -> dict[str, Any]:
    [one] = pod(name)["containers"]
    assert isinstance(one, dict)
    return one


def head_args() -> Any:
    """As the image's entry point would complete them."""
    text = (DEPLOY / "Dockerfile").read_text()
    [entrypoint] = [line for line in text.splitlines() if line.startswith("ENTRYPOINT ")]
    script = json.loads(entrypoint.removeprefix("ENTRYPOINT "))[2]
    words = shlex.split(script.removeprefix("exec stageline ").replace('"$(hostname)"', "stageline-head-0"))
    at = words.index("$@")
    given = [word.replace("$(POD_IP)", POD_IP) for word in container("stageline-head")["args"]]
    return build_parser().parse_args([*words[:at], *given, *words[at + 1 :]])


def test_the_heads_command_is_one_that_stageline_takes() -> None:
    args = head_args()
    cluster, engine = cluster_config_from_args(args), engine_config_from_args(args)
    assert cluster.master_addr == POD_IP and cluster.master_port == DEFAULT_CLUSTER_PORT
    assert cluster.nnodes == 1 + objects("StatefulSet")["stageline-worker"]["spec"]["replicas"]
    assert engine.pipeline_parallel_size >= cluster.nnodes
    assert serve_config_from_args(args).port == 8000


def test_the_workers_command_leads_to_the_heads_port() -> None:
    program, *words = container("stageline-worker")["command"]
    assert program == "stageline"
    args = build_parser().parse_args(words)
    service, _, port = args.head.partition(":")
    assert objects("Service")[service]["spec"]["publishNotReadyAddresses"] is True
    [open_port] = objects("Service")[service]["spec"]["ports"]
    assert open_port["port"] == int(port) == DEFAULT_CLUSTER_PORT


def test_services_and_policies_select_the_pods_that_have_their_ports() -> None:
    open_ports = {one["containerPort"] for one in container("stageline-head")["ports"]}
    head_labels = objects("StatefulSet")["stageline-head"]["spec"]["template"]["metadata"]["labels"]
    for service in objects("Service").values():
        assert service["spec"]["selector"].items() <= head_labels.items()
        assert {one["port"] for one in service["spec"]["ports"]} <= open_ports
    [policy] = objects("NetworkPolicy").values()
    allowed = {one["port"] for rule in policy["spec"]["ingress"] for one in rule["ports"]}
    # Behind the head's port: one for activations, and one for weights with --model-source peer.
    assert allowed == open_ports == {8000, *range(DEFAULT_CLUSTER_PORT, DEFAULT_CLUSTER_PORT + 3)}
    workers_ports = {one["containerPort"] for one in container("stageline-worker")["ports"]}
    assert workers_ports == open_ports - {8000, DEFAULT_CLUSTER_PORT}


@pytest.mark.parametrize("name", ["stageline-head", "stageline-worker"])
def test_pods_have_a_key_and_no_privileges(name: str) -> None:
    keys = {one["name"] for one in container(name)["env"] if "secretKeyRef" in one["valueFrom"]}
    assert "STAGELINE_CLUSTER_KEY" in keys
    locked = container(name)["securityContext"]
    assert locked["readOnlyRootFilesystem"] and not locked["allowPrivilegeEscalation"]
    assert locked["capabilities"]["drop"] == ["ALL"] and pod(name)["securityContext"]["runAsNonRoot"]
    assert "hostNetwork" not in pod(name) and not pod(name)["automountServiceAccountToken"]
    names = {one["name"] for one in pod(name)["volumes"]}
    assert {one["name"] for one in container(name)["volumeMounts"]} == names


def test_running_requests_have_the_time_to_finish() -> None:
    assert pod("stageline-head")["terminationGracePeriodSeconds"] >= ServeConfig().drain_timeout_s + 10
