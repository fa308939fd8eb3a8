"""deploy/ starts servers that there are: its flags, variables, addresses and files exist."""

from __future__ import annotations

import argparse
import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.interfaces.cli import serve
from quire.interfaces.server.access.caller import PUBLIC_PATHS
from quire.interfaces.server.options import ServerOptions

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy"
FILES = sorted(path for path in FOLDER.iterdir() if path.is_file())
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
PODS = {part["kind"]: part for part in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())}
CONTAINER = PODS["Deployment"]["spec"]["template"]["spec"]["containers"][0]


def unit() -> Any:
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=["="])
    parser.optionxform = str
    parser.read(FOLDER / "quire.service")
    return parser


DOCKERFILES = ("Dockerfile", "Dockerfile.cuda")


def dockerfile(name: str) -> list[str]:
    text = re.sub(r"^\s*#.*\n", "", (FOLDER / name).read_text(), flags=re.MULTILINE)
    return text.replace("\\\n", " ").splitlines()


def words_of_cmd(name: str) -> list[str]:
    cmd = [line.removeprefix("CMD ") for line in dockerfile(name) if line.startswith("CMD ")]
    return [word for line in cmd for word in yaml.safe_load(line)]


def commands() -> dict[str, list[str]]:
    return {
        **{name: words_of_cmd(name) for name in DOCKERFILES},
        "compose.yaml": COMPOSE["services"]["quire"]["command"],
        "kubernetes.yaml": CONTAINER["args"],
        "quire.service": shlex.split(unit()["Service"]["ExecStart"])[2:],
    }


@pytest.mark.parametrize("name", commands())
def test_the_command_line_is_taken(name):
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    serve.add_arguments(parser)
    # $NAME: what the environment says
    words = ["embedded" if word.startswith("$") else word for word in commands()[name]]
    known, unknown = parser.parse_known_args(words)
    assert unknown == []
    assert known.host in ("127.0.0.1", "0.0.0.0")


def test_variables_are_read_somewhere():
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    # what is the deployment's own
    own = {"QUIRE_ARGUMENTS", "QUIRE_MODEL"}
    named = {name for path in FILES for name in re.findall(r"\bQUIRE_[A-Z_]+\b", path.read_text())}
    assert {"QUIRE_API_KEY", "QUIRE_CACHE_DIR"} <= named
    assert {name for name in named - own if name not in source} == set()


def test_probes_need_no_key():
    probes = [CONTAINER[name]["httpGet"]["path"] for name in ("livenessProbe", "readinessProbe")]
    files = [(FOLDER / name).read_text() for name in DOCKERFILES]
    asked = [path for text in files for path in re.findall(r"http://127\.0\.0\.1:8000(/[a-z/]+)", text)]
    assert len(asked) == len(files)
    assert {*probes, *asked} <= set(PUBLIC_PATHS)


def test_files_that_they_take_are_there():
    lines = [line for name in DOCKERFILES for line in dockerfile(name)]
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    context = FOLDER / COMPOSE["services"]["quire"]["build"]["context"]
    paths = [context / path for words in copied for path in words]
    paths.append(context / COMPOSE["services"]["quire"]["build"]["dockerfile"])
    mounted = [volume for service in COMPOSE["services"].values() for volume in service.get("volumes", ())]
    paths += [FOLDER / volume.split(":")[0] for volume in mounted if volume.startswith(".")]
    assert len(paths) >= 6
    assert [str(path) for path in paths if not path.exists()] == []


def test_parts_of_the_composition_know_each_other():
    configs = {name: yaml.safe_load(config["content"]) for name, config in COMPOSE["configs"].items()}
    used = {one["source"] for service in COMPOSE["services"].values() for one in service.get("configs", ())}
    assert used == set(configs)
    [scrape] = configs["prometheus"]["scrape_configs"]
    [target] = scrape["static_configs"][0]["targets"]
    assert target.split(":")[0] in COMPOSE["services"]
    secret = Path(scrape["authorization"]["credentials_file"])
    assert secret.name in COMPOSE["secrets"]
    assert secret.name in COMPOSE["services"]["prometheus"]["secrets"]
    boards = configs["boards"]["providers"][0]["options"]["path"]
    assert any(f":{boards}:" in volume for volume in COMPOSE["services"]["grafana"]["volumes"])


def test_there_is_time_to_end_in_order():
    grace = PODS["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    compose = COMPOSE["services"]["quire"]["stop_grace_period"].removesuffix("s")
    seconds = ServerOptions.shutdown_timeout + 10
    assert min(grace, int(compose), int(unit()["Service"]["TimeoutStopSec"])) >= seconds


def test_volumes_and_selectors_of_the_pod():
    template = PODS["Deployment"]["spec"]["template"]
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == set(volumes)
    claim = volumes["data"]["persistentVolumeClaim"]["claimName"]
    assert claim == PODS["PersistentVolumeClaim"]["metadata"]["name"]
    assert PODS["Service"]["spec"]["selector"].items() <= template["metadata"]["labels"].items()
