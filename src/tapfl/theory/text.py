"""The bound as a text that explains itself."""

from __future__ import annotations

import textwrap

from tapfl.theory.analysis import Analysis, notes
from tapfl.theory.bound import TERMS

SHOWN = 12  # blocks; the rest in one line
WIDTH = 96
LETTERS = {"smoothness": "L, how fast a client's gradient changes",
           "noise": "sigma^2, the variance of a client's minibatch gradient",
           "heterogeneity": "Z, the sum of zeta_r^2: how much owners of a block disagree",
           "gap": "f(W_0) - E f(W_T), how far the objective falls"}
FORMS = {"theorem": "as the theorem has it: R sigma^2 in the drift",
         "proof": "as its proof ends: (R + 1)/3 sigma^2",
         "weighted": "for the mean in which a block counts by its share of owners; holds where "
                     "losses couple blocks"}


def text(found: Analysis) -> str:
    """Return the plain output of ``tapfl bound``."""
    parts = [_head(found), _constants(found), _terms(found), _blocks(found), _pairs(found),
             _forms(found), "\n".join(["what to know"] + [
                 textwrap.fill(note, WIDTH, initial_indent="  - ", subsequent_indent="    ")
                 for note in notes(found)])]
    return "\n\n".join(parts)


def _head(found: Analysis) -> str:
    setting = found.setting
    average = ("E||grad f(W_t)||^2, averaged over rounds by step size, is at most "
               f"{found.bounds['theorem'].total:.4g}")
    return (f"FedAvg's server model in {found.name}: {setting.clients} clients, "
            f"{len(setting.blocks)} blocks (R = {setting.last})\n{average}")


def _constants(found: Analysis) -> str:
    setting, origins = found.setting, found.constants.origins
    values = {"smoothness": setting.smoothness, "noise": setting.noise,
              "heterogeneity": setting.heterogeneity, "gap": setting.gap}
    lines = [f"  {values[key]:>10.4g}  {meaning} ({origins[key]})"
             for key, meaning in LETTERS.items()]
    lines += [f"  {setting.inverse_owners:>10.4g}  C_K, the sum of 1/K_r (counted)",
              f"  {setting.local_steps:>10}  tau, local steps",
              f"  {len(found.step_sizes):>10}  T, rounds",
              f"  {found.max_step_size:>10.4g}  the largest step size allowed, 1/(48 L tau)",
              f"  step size: {found.schedule}"]
    if found.estimates:
        lines.append("  at the stored model, the blocks' mean gradients have a squared length of "
                     f"about {found.estimates.gradient:.4g}")
    return "\n".join(["what goes in", *lines])


def _terms(found: Analysis) -> str:
    theorem = found.bounds["theorem"]
    lines = [f"  {term:<14}{value:>11.4g}{_share(value, theorem.total)}  {TERMS[term]}"
             for term, value in theorem.terms.items()]
    return "\n".join(["the bound, term by term", *lines])


def _blocks(found: Analysis) -> str:
    theorem = found.bounds["theorem"]
    order = sorted(found.setting.blocks, key=lambda b: -theorem.costs[b.name])
    shown = order if len(order) <= SHOWN + 1 else order[:SHOWN]
    width = max(len(block.name) for block in shown)
    lines = [f"  {'block':<{width}}{'K_r':>6}{'zeta_r^2':>11}{'cost':>11}  share"]
    lines += [f"  {b.name:<{width}}{b.owners:>6}{b.heterogeneity:>11.4g}"
              f"{theorem.costs[b.name]:>11.4g}{_share(theorem.costs[b.name], theorem.total)}"
              for b in shown]
    if rest := order[len(shown):]:
        cost = sum(theorem.costs[b.name] for b in rest)
        lines.append(f"  {f'{len(rest)} more blocks':<{width}}{'':>17}{cost:>11.4g}"
                     f"{_share(cost, theorem.total)}")
    return "\n".join(["what each block adds (all terms but the gap), most costly first", *lines])


def _pairs(found: Analysis) -> str:
    width = max(len(pair) for pair, _, _ in found.pairs)
    lines = [f"  {'added':<{width}}  clients  blocks     C_K      bound   weighted"]
    for pair, owned, bounds in found.pairs:
        inverse = sum(1 / k for k in owned.owners.values())
        lines.append(f"  {pair:<{width}}{owned.clients:>9}{len(owned.owners):>8}{inverse:>8.3f}"
                     f"{bounds['theorem'].total:>11.4g}{bounds['weighted'].total:>11.4g}")
    return "\n".join(["as modality-task pairs are added one by one", *lines])


def _forms(found: Analysis) -> str:
    lines = [f"  {form:<10}{each.total:>11.4g}  {FORMS[form]}"
             for form, each in found.bounds.items()]
    return "\n".join(["three forms of the bound", *lines])


def _share(value: float, total: float) -> str:
    return f"{100 * value / total:>6.1f}%" if total > 0 else "       "
