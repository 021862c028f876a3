"""The units and the compose file: their commands exist, and data and network are kept apart."""

import configparser
import re
import shlex
from pathlib import Path

import pytest
import yaml

from tapfl.cli import build_parser

EXAMPLES = Path(__file__).parents[2] / "examples" / "deploy"
UNITS = {path.stem: path for path in sorted((EXAMPLES / "systemd").glob("*.service"))}
COMPOSE = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())
SOCKET = 'socket="/run/tapfl/resident"'


def unit(name):
    """Return the settings of a unit's service; one that is repeated has all its values."""
    class Repeated(dict):
        def __setitem__(self, key, value):
            before = self.get(key)
            if isinstance(value, list) and isinstance(before, list):
                value = before + value
            super().__setitem__(key, value)

    parser = configparser.ConfigParser(dict_type=Repeated, strict=False, interpolation=None)
    parser.optionxform = str
    parser.read_string(UNITS[name].read_text())
    return dict(parser["Service"])


def commands():
    """Return every command of the examples as words, by where it is."""
    found = {name: shlex.split(unit(name)["ExecStart"]) for name in UNITS}
    for name, service in COMPOSE["services"].items():
        found[f"compose {name}"] = [*service.get("entrypoint", ["tapfl"]), *service["command"]]
    for folder in ("deploy", "flower"):
        readme = (EXAMPLES.parent / folder / "README.md").read_text()
        lines = re.findall(r"^    ((?:tapfl|flower-supernode) .*?)(?: [&>].*)?$", readme, re.M)
        for number, line in enumerate(lines):
            found[f"{folder}/README {number}"] = shlex.split(line)
    return found


def test_there_are_units_and_services():
    assert set(UNITS) == {"tapfl-server", "tapfl-resident", "tapfl-supernode"}
    assert set(COMPOSE["services"]) == {"server", "resident", "supernode"}


@pytest.mark.parametrize("where", commands())
def test_commands_exist_with_their_options(where, capsys, monkeypatch):
    program, *words = commands()[where]
    if Path(program).name == "tapfl":
        try:
            options = build_parser().parse_args(words)
        except SystemExit:
            pytest.fail(capsys.readouterr().err)
        assert callable(options.run)
        return
    assert Path(program).name == "flower-supernode"
    flower = pytest.importorskip("flwr.supernode.cli.flower_supernode")
    options = flower._parse_args_run_supernode().parse_args(words)
    assert options.node_config.startswith("socket=")
    assert not options.insecure
    assert options.auth_supernode_private_key


def test_the_flower_config_is_read_as_it_is_meant():
    config = pytest.importorskip("flwr.common.config")
    assert config.parse_config_args([SOCKET]) == {"socket": "/run/tapfl/resident"}


def test_every_supernode_knows_the_residents_socket():
    assert unit("tapfl-supernode")["ExecStart"].endswith(f"--node-config '{SOCKET}'")
    assert COMPOSE["services"]["supernode"]["command"][-1] == SOCKET


@pytest.mark.parametrize("name", UNITS)
def test_units_are_hardened(name):
    service = unit(name)
    assert service["User"] not in ("root", "")
    for key in ("PrivateTmp", "NoNewPrivileges", "ProtectHome", "ProtectKernelModules"):
        assert service[key] == "yes", key
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == ""
    assert service["StateDirectory"]
    assert service["StateDirectoryMode"] == "0700"


def test_who_has_the_data_has_no_network_and_who_has_the_network_no_data():
    resident, supernode = unit("tapfl-resident"), unit("tapfl-supernode")
    assert resident["User"] != supernode["User"]
    assert resident["PrivateNetwork"] == "yes"
    assert resident["RestrictAddressFamilies"] == "AF_UNIX"
    data = resident["ReadOnlyPaths"].split()
    hidden = [path.lstrip("-") for path in supernode["InaccessiblePaths"].split()]
    assert {*data, f"/var/lib/{resident['StateDirectory']}"} <= set(hidden)
    command = shlex.split(resident["ExecStart"])
    assert command[command.index("--group") + 1] == supernode["User"]  # the user's own group
    assert "--allow" not in command
    services = COMPOSE["services"]
    assert services["resident"]["network_mode"] == "none"
    assert "./federation:/federation:ro" in services["resident"]["volumes"]
    assert services["supernode"]["volumes"] == ["net-state:/state", "socket:/run/tapfl"]


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_containers_have_no_rights_and_named_volumes(name):
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    for volume in service["volumes"]:
        source, _, *mode = volume.split(":")
        assert source in COMPOSE["volumes"] or mode == ["ro"], volume
    assert "USER tapfl" in (EXAMPLES / "Dockerfile").read_text()
