"""Flower's half of a server: it gives a run of tapfl the way to the nodes.

Run-config: ``job`` is the file that says what to run, written by `tapfl deploy server`
(`tapfl.engine.flower.job`). It is read on the server's machine.
"""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the job to its end."""
    from tapfl.engine.flower.grid import GridTransport
    from tapfl.engine.flower.job import carry_out, read_job

    carry_out(read_job(Path(str(context.run_config["job"]))), GridTransport(grid))
