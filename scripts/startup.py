"""How long the first things a user does take to start: python scripts/startup.py"""

import subprocess
import sys
import time


def best(command: list[str], tries: int = 5) -> float:
    times = []
    for _ in range(tries):
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    python = sys.executable
    print(f"best of 5; python alone {best([python, '-c', 'pass']):.3f} s")
    print(f"  import tapfl       {best([python, '-c', 'import tapfl']):.3f} s")
    print(f"  tapfl --help       {best([python, '-m', 'tapfl', '--help']):.3f} s")
    print(f"  tapfl model mini   {best([python, '-m', 'tapfl', 'model', 'mini'], 2):.3f} s")


if __name__ == "__main__":
    main()
