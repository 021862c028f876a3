"""How often is a difference seen where there is none? python scripts/calibrate_verdicts.py [CASES]

Simulates gains of mean 0 with effects of seeds and clients as large as the noise, and counts what
is called better or worse: by plain percentiles of a nested bootstrap, and by tapfl's interval.
"""

import sys

import numpy as np

from tapfl.evaluation.bootstrap import interval, judge

TOLD = ("better", "worse")


def plain(gains, rng, replicates=1000):
    """Draw seeds, then clients within each; take the percentiles as they are."""
    seeds, clients = gains.shape
    drawn = rng.integers(seeds, size=(replicates, seeds))
    within = rng.integers(clients, size=(replicates, seeds, clients))
    low, high = np.percentile(gains[drawn[:, :, None], within].mean(axis=(1, 2)), [2.5, 97.5])
    return low > 0 or high < 0


def main(cases):
    rng = np.random.default_rng(11)
    print("seeds clients  varying           plain  stretched")
    for seeds, clients in ((2, 9), (3, 3), (3, 9), (4, 9)):
        for by_seed, by_client, what in ((0, 0, "noise alone"), (1, 0, "seeds"),
                                         (0, 1, "clients"), (1, 1, "seeds and clients")):
            found = [by_seed * rng.normal(size=(seeds, 1)) + by_client * rng.normal(size=clients)
                     + rng.normal(size=(seeds, clients)) for _ in range(cases)]
            shares = (np.mean([plain(gains, rng) for gains in found]),
                      np.mean([judge(interval(gains), 0) in TOLD for gains in found]))
            print(f"{seeds:5} {clients:7}  {what:17} {shares[0]:5.1%} {shares[1]:9.1%}", flush=True)
    found = [rng.normal(size=(3, 9, 50)) + rng.normal(size=50) for _ in range(cases)]
    for shared in (False, True):
        share = np.mean([judge(interval(g.mean(axis=2), list(g), shared), 0) in TOLD
                         for g in found])
        print(f"one test set, taken as {'one' if shared else 'many'}: {share:.1%}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1500)
