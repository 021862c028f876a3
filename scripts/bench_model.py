"""Start-up times, model sizes and one training step of the mini model: make bench"""

import subprocess
import sys
import time

import torch

from tapfl.config import load_config
from tapfl.data.federation import load_federation
from tapfl.model.network import build_network
from tapfl.model.summary import summarize
from tapfl.tasks import Batch


def best(command: list[str], tries: int = 5) -> float:
    times = []
    for _ in range(tries):
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - started)
    return min(times)


def step_time(network, task, size=32, steps=10) -> float:
    generator = torch.Generator().manual_seed(0)
    batch = Batch(image=torch.randint(0, 256, (size, 3, 64, 64), dtype=torch.uint8),
                  text=torch.randint(5, 100, (size, 24), generator=generator),
                  label=torch.zeros(size, dtype=torch.long),
                  answer=torch.randint(5, 100, (size, 12), generator=generator))
    optimizer = torch.optim.AdamW(network.blocks.parameters(), lr=1e-4)
    network.train()
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        optimizer.zero_grad()
        network.loss(task, network(task, batch), batch).backward()
        optimizer.step()
        times.append(time.perf_counter() - started)
    return sorted(times)[steps // 2]


def main() -> None:
    python = sys.executable
    print(f"start-up, best of 5 (python alone {best([python, '-c', 'pass']):.3f} s)")
    print(f"  import tapfl       {best([python, '-c', 'import tapfl']):.3f} s")
    print(f"  tapfl --help       {best([python, '-m', 'tapfl', '--help']):.3f} s")
    print(f"  tapfl model mini   {best([python, '-m', 'tapfl', 'model', 'mini'], 2):.3f} s")
    for preset in ("mini", "pair", "vilt", "flava"):
        total = summarize(load_config(preset))
        print(f"{preset}: server {total['total'] / 1e6:.1f} M parameters, "
              f"{total['trainable'] / 1e6:.1f} M trainable")
    config = load_config("mini")
    tasks = load_federation(config.federation).task_table()
    network = build_network(config, tasks)
    print(f"one step of mini, batch 32, {torch.get_num_threads()} threads, median of 10")
    for task in ("tiny-imagenet", "fmnist", "agnews", "mmlu", "vqa"):
        print(f"  {task:<16} {step_time(network, task) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
