"""Linear probes on the shipped mini weights and on random ones: python scripts/probe.py"""

import itertools

from tapfl.config import load_config
from tapfl.data.participants import load_federation
from tapfl.data.sources import load_data
from tapfl.evaluation.probe import linear_probe
from tapfl.model.foundation import build_foundation, load_tokenizer


def main() -> None:
    print(f"{'samples':<10}{'weights':<10}{'tiny-imagenet':>15}{'cifar100':>10}{'agnews':>10}"
          "   (test accuracy, %)")
    for samples, weights in itertools.product((100, 2000), ("shipped", "random")):
        config = load_config("quickstart", [f"data.train={samples}", "data.test=1000",
                                            "data.seed=77", f"foundation.weights={weights}"])
        tasks = {n: t for n, t in load_federation(config.federation).task_table().items()
                 if t.is_classification}
        data = load_data(config, tasks, load_tokenizer(config.foundation), 256)
        base = build_foundation(config.foundation)
        scores = [linear_probe(base, *data[name]) for name in ("tiny-imagenet", "cifar100",
                                                              "agnews")]
        print(f"{samples:<10}{weights:<10}{scores[0]:>15.1f}{scores[1]:>10.1f}{scores[2]:>10.1f}")


if __name__ == "__main__":
    main()
