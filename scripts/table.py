"""Put the results of several runs into one Markdown table: python scripts/table.py RUN...

Every RUN is a folder with results.csv, or such a file. Means and spreads are over clients and
seeds.
"""

import sys
from pathlib import Path

from tapfl.engine.record import read_results
from tapfl.report.tables import markdown

ORDER = ["local", "fedavg", "fedavg+post", "perfedavg", "perfedavg+post", "disentafl",
         "disentafl+post", "feddat", "feddat+post", "tap", "tap-nokd"]


def main() -> None:
    rows = []
    for name in sys.argv[1:]:
        path = Path(name)
        rows += read_results(path / "results.csv" if path.is_dir() else path)
    methods = [m for m in ORDER if any(r["method"] == m for r in rows)]
    rows = [r for r in rows if r["method"] in methods]
    for columns in (("tiny-imagenet", "cifar100", "fmnist", "caltech256"),
                    ("agnews", "mmlu", "vqa", "commongen")):
        chosen = [r for r in rows if r["dataset"] in columns]
        chosen.sort(key=lambda r: columns.index(r["dataset"]))
        print(markdown(chosen, methods), end="\n\n")


if __name__ == "__main__":
    main()
