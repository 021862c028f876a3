"""kill -9 anywhere, again and again, with another number of threads around it each time."""

import multiprocessing
import os
import random
import signal
import time

import pytest

from tapfl.engine.run import run
from tests.engine.test_resume import same_run
from tests.experiment import tiny_experiment


def _work(values, out, resume, threads):
    import torch

    from tapfl.config import Config

    torch.set_num_threads(threads)  # as OMP_NUM_THREADS does: the run sets its own
    run(Config.model_validate(values), out, resume=resume)


class Attempts:
    """Processes that run an experiment; each is forked from a server that has imported all."""

    def __init__(self, config):
        self.config = config
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(
            ["tapfl.engine.run", "transformers.models.flava.modeling_flava"])
        starting = self.context.Process(target=time.sleep, args=(0,))
        starting.start()
        starting.join()

    def start(self, out, threads=1):
        process = self.context.Process(target=_work, args=(
            self.config.model_dump(mode="json"), out, (out / "run.json").exists(), threads))
        process.start()
        return process

    def whole(self, out):
        started = time.monotonic()
        process = self.start(out)
        process.join()
        assert process.exitcode == 0
        return time.monotonic() - started


def storm(folder, config, kills, seed=5):
    """Kill a run so often, wherever it is; check every one that comes through."""
    attempts = Attempts(config)
    calm, stormy = folder / "calm", folder / "stormy0"
    attempts.whole(folder / "warm-up")
    duration = attempts.whole(calm)
    points, killed, finals = random.Random(seed), 0, 0
    for attempt in range(20 * kills):
        last = killed == kills
        process = attempts.start(stormy, threads=1 + attempt % 3)
        process.join(None if last else points.uniform(0.1, 0.8) * duration)
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            killed += 1
            finals += any(stormy.glob("state/*/final/*.json"))
            continue
        assert process.exitcode == 0
        same_run(stormy, calm)
        if last:
            return finals
        stormy = folder / f"stormy{attempt + 1}"
    raise AssertionError(f"{killed} of {kills} kills")


@pytest.mark.long
def test_killed_at_two_random_points(tmp_path):
    """The resumed run's results, events and models are those of an undisturbed one."""
    config = tiny_experiment(tmp_path, methods=["local", "tap"], train={"local_steps": 1},
                             post={"steps": 1}, data={"train": 16, "test": 3})
    storm(tmp_path, config, kills=2)


@pytest.mark.long
def test_killed_at_twenty_points_in_stage_2_too_and_with_private_adapters(tmp_path):
    wide = {"of": "tap", "tap": {"margins": {"text_classification": -1.0}}}
    config = tiny_experiment(
        tmp_path, methods=["feddat", "feddat+post", "tap", "wide", "perfedavg"], threads=2,
        variants={"wide": wide}, train={"local_steps": 1, "rounds": 3}, post={"steps": 1},
        data={"train": 16, "test": 3}, checkpoint={"every": 1},
        federation={"max_update_norm": "50x"})
    assert storm(tmp_path, config, kills=20)  # some fell after a client's final models
