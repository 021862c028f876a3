"""`tapfl deploy stop`: the command that works in a folder ends, with what it keeps running."""

import subprocess
import sys
import time

from tapfl.cli import main
from tapfl.deploy.processes import OWNER, RECORD, recorded

# A command that starts its child again, as a node does.
COMMAND = """
import signal, sys, time
from pathlib import Path
from tapfl.deploy.processes import Processes
from tapfl.deploy.supervise import Supervisor

def stop(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGTERM, stop)
processes = Processes(Path(sys.argv[1]))
supervisor = Supervisor(processes, print)
supervisor.keep("child", [sys.executable, "-c", "import time; time.sleep(600)"])
try:
    while True:
        supervisor.look()
        time.sleep(0.05)
except KeyboardInterrupt:
    pass
finally:
    processes.stop()
"""


def test_what_would_start_them_again_ends_first(tmp_path, capsys):
    place = tmp_path / "node.flower"
    with subprocess.Popen([sys.executable, "-c", COMMAND, str(place)]) as command:
        try:
            until = time.monotonic() + 60
            while not recorded(place) and time.monotonic() < until:
                time.sleep(0.05)
            assert main(["deploy", "stop", str(tmp_path / "node")]) == 0
            assert capsys.readouterr().out == "stopped: the command\n"
            assert command.wait(10) == 0
        finally:
            command.kill()
    assert not (place / RECORD).exists()
    assert not (place / OWNER).exists()
    assert main(["deploy", "stop", str(tmp_path / "node")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'node'}: nothing is running\n"


def test_a_command_that_was_killed_is_nobody(tmp_path, capsys):
    (tmp_path / "node.flower").mkdir()
    (tmp_path / "node.flower" / OWNER).write_text('{"the command": {"pid": 1, "started": "-1"}}')
    assert main(["deploy", "stop", str(tmp_path / "node")]) == 0
    assert "nothing is running" in capsys.readouterr().out
