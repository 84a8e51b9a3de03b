"""What deploy/ says of this package is true: commands parse, files are there, ports and times fit together."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest
import yaml

from stageline.cli.main import build_parser
from stageline.config.flags import serve_config_from_args
from stageline.config.serve_config import ServeConfig
from tests.architecture.source_tree import ROOT

DEPLOY = ROOT / "deploy"


def _compose() -> dict[str, Any]:
    loaded = yaml.safe_load((DEPLOY / "compose.yml").read_text())
    assert isinstance(loaded, dict)
    return loaded


def _unit() -> dict[str, str]:
    """The last value of each key."""
    return dict(re.findall(r"^(\w+)=(.*)$", (DEPLOY / "stageline.service").read_text(), flags=re.M))


def _dockerfile(instruction: str) -> list[str]:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    return [line.removeprefix(instruction).strip() for line in text.splitlines() if line.startswith(f"{instruction} ")]


def _serve_config(argv: list[str]) -> ServeConfig:
    return serve_config_from_args(build_parser().parse_args(argv))


def test_the_containers_command_is_one_that_stageline_takes() -> None:
    [entrypoint] = _dockerfile("ENTRYPOINT")
    shell, _, script, name = json.loads(entrypoint)
    assert (shell, name) == ("sh", "stageline")
    command = _compose()["services"]["stageline"]["command"]
    words = shlex.split(script.removeprefix("exec stageline ").replace('"$(hostname)"', "container"))
    at = words.index("$@")
    config = _serve_config([*words[:at], *command, *words[at + 1 :]])
    assert (config.host, config.port, config.insecure) == ("container", 8000, True)
    assert _dockerfile("EXPOSE") == ["8000"]


def test_the_services_command_is_one_that_stageline_takes() -> None:
    program, *words = shlex.split(_unit()["ExecStart"])
    assert program.endswith("/stageline")
    flags = ["-pp", "2", "--host", "127.0.0.1", "--port", "8000"]
    filled = [part for word in words for part in {"$MODEL": ["m"], "$FLAGS": flags}.get(word, [word])]
    assert _serve_config(filled).api_key_file == "%d/api-keys"


@pytest.mark.parametrize("what", ["compose", "systemd"])
def test_running_requests_have_the_time_to_finish_that_the_server_gives_them(what: str) -> None:
    texts = {"compose": _compose()["services"]["stageline"]["stop_grace_period"], "systemd": _unit()["TimeoutStopSec"]}
    assert int(texts[what].removesuffix("s")) >= ServeConfig().drain_timeout_s + 10


def test_everything_that_is_mounted_or_copied_is_there() -> None:
    compose = _compose()
    for service in compose["services"].values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"], mount
    for line in _dockerfile("COPY"):
        if not line.startswith("--from"):
            assert all((ROOT / source).exists() for source in line.split()[:-1]), line


def test_ports_are_published_to_this_machine_only() -> None:
    published = [port for service in _compose()["services"].values() for port in service.get("ports", [])]
    assert published and all(port.startswith("127.0.0.1:") for port in published)


def test_torchs_version_is_found_where_the_image_looks_for_it() -> None:
    [pattern] = re.findall(r"sed -n 's/(.*)/\\1/p' pyproject.toml", (DEPLOY / "Dockerfile").read_text())
    found = re.findall(pattern.replace("\\(", "(").replace("\\)", ")"), (ROOT / "pyproject.toml").read_text(), re.M)
    assert len(found) == 1 and found[0].startswith("torch==")


def test_a_mistaken_configuration_is_not_tried_again() -> None:
    assert _unit()["RestartPreventExitStatus"] == "2"
