"""Flower's half of a server: it gives a run of tapfl the way to the nodes.

Run-config says what to run (`tapfl.engine.flower.job.job_of`): ``job`` is a file that `tapfl deploy
server` wrote; without one, ``preset`` and ``out`` are a run's configuration and folder. All of them
are on the server's machine.
"""

from __future__ import annotations

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the job to its end."""
    from tapfl.engine.flower.grid import GridTransport
    from tapfl.engine.flower.job import carry_out, job_of

    # What is printed here is what `flwr log` shows.
    carry_out(job_of(context.run_config), GridTransport(grid),
              lambda text: print(text, flush=True))
