"""The files of `examples/deploy/` agree with the command line, with each other, and with the package."""

import configparser
import re
import shlex
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from outbox import Settings
from outbox.admin.gauges import Looks
from outbox.cli.config import options_of
from outbox.cli.http import serving
from outbox.relay.supervisor import Supervisor
from outbox.senders.port import DEADLINE
from tests.cli.test_cli_help import ALL
from tests.support.pages import TOP

DEPLOY = TOP / "examples" / "deploy"
PROJECT = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
DOCKERFILE = dict(line.split(" ", 1) for line in (DEPLOY / "Dockerfile").read_text().splitlines() if line[:1].isupper())
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
KUBERNETES = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
UNIT = configparser.ConfigParser(interpolation=None)
UNIT.optionxform = str  # type: ignore[assignment,method-assign]  # names of systemd have capitals
UNIT.read(DEPLOY / "outbox-relay.service")


def pods() -> Iterator[dict[str, Any]]:
    """The specifications of pods, in jobs and deployments."""
    for each in KUBERNETES:
        if "template" in each["spec"]:
            yield each["spec"]["template"]["spec"]


PODS = list(pods())
CONTAINERS = [container for pod in PODS for container in pod["containers"]]
RELAY = next(each for each in CONTAINERS if each["name"] == "relay")
COMMANDS = [
    yaml.safe_load(DOCKERFILE["CMD"]),
    shlex.split(UNIT["Service"]["ExecStart"])[1:],
    *(each["command"] for each in COMPOSE.values() if "command" in each),
    *(each["args"] for each in CONTAINERS),
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_each_command_is_one_of_the_command_line(arguments):
    """Its options exist, and their values are taken."""
    words = next(number for number in (1, 2) if " ".join(arguments[:number]) in ALL)
    context = ALL[" ".join(arguments[:words])].make_context("outbox", arguments[words:])

    assert context.args == []


def test_each_variable_is_that_of_an_option():
    known = {f"OUTBOX_{path.upper().replace(' ', '_')}_{name.upper()}" for path, command in ALL.items()
             for name in options_of(command)} | {"OUTBOX_DATABASE"}  # fmt: skip

    named = {name for file in DEPLOY.iterdir() for name in re.findall(r"OUTBOX_[A-Z_]+", file.read_text())}

    assert (named <= known, len(named) >= 2) == (True, True), named - known


def test_the_probes_ask_for_what_is_answered_at_the_port_that_listens(capsys):
    with serving("127.0.0.1", 0, Supervisor([]), Looks({})):
        paths = capsys.readouterr().err.split(" answers ")[1].split()
    port = int(RELAY["args"][RELAY["args"].index("--http") + 1].rpartition(":")[2])
    probes = [RELAY[name]["httpGet"] for name in ("livenessProbe", "readinessProbe")]
    asked = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", COMPOSE["relay"]["healthcheck"]["test"][-1])

    assert [(each["path"], each["port"]) for each in probes] == [("/livez", "probes"), ("/readyz", "probes")]
    assert {"/livez", "/readyz"} <= set(paths)
    assert asked is not None
    assert (RELAY["ports"], asked.groups()) == ([{"name": "probes", "containerPort": port}], (str(port), "/livez"))
    assert {f"0.0.0.0:{port}"} == {each for command in COMMANDS for each in command if each.startswith("0.0.0.0:")}


def test_nobody_is_root_or_may_write_or_become_more():
    user = int(DOCKERFILE["USER"].partition(":")[0])

    assert user > 0
    assert {(pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) for pod in PODS} == {
        (True, user)
    }
    assert [each["securityContext"] for each in CONTAINERS] == [
        {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    ] * len(CONTAINERS)
    assert (COMPOSE["relay"]["read_only"], COMPOSE["relay"]["cap_drop"]) == (True, ["ALL"])
    assert (UNIT["Service"]["DynamicUser"], UNIT["Service"]["NoNewPrivileges"]) == ("yes", "yes")


def test_a_relay_that_is_replaced_has_the_time_to_end_and_another_one_to_take_over():
    """Calls under way take their deadline, and a renewal its lease; the next relay is ready before one ends."""
    (deployment,) = (each for each in KUBERNETES if each["kind"] == "Deployment")
    drain = (DEADLINE + Settings().lease).total_seconds()
    spec = deployment["spec"]

    granted = [
        spec["template"]["spec"]["terminationGracePeriodSeconds"], int(UNIT["Service"]["TimeoutStopSec"]),
        int(COMPOSE["relay"]["stop_grace_period"].removesuffix("s")),
    ]  # fmt: skip
    assert [seconds for seconds in granted if seconds < drain] == []
    assert (spec["replicas"], spec["strategy"]["rollingUpdate"]) == (2, {"maxSurge": 1, "maxUnavailable": 0})
    assert COMPOSE["relay"]["deploy"]["replicas"] == 2


def test_the_versions_are_those_of_the_package():
    newest = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python :: 3." in each][-1]

    assert DOCKERFILE["FROM"] == f"python:{newest}-slim"
    assert DOCKERFILE["RUN"].endswith(f"=={PROJECT['version']}'")
    assert {each["image"] for each in CONTAINERS} == {f"registry.example/outbox:{PROJECT['version']}"}
    assert KUBERNETES[0]["metadata"]["name"] == f"outbox-upgrade-{PROJECT['version'].replace('.', '-')}"


def test_systemd_knows_that_the_relay_lives():
    assert {name: UNIT["Service"][name] for name in ("Type", "WatchdogSec", "Restart")} == {
        "Type": "notify", "WatchdogSec": "30", "Restart": "always",
    }  # fmt: skip
