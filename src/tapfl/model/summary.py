"""Count a model's parameters, without weights and without memory (`tapfl model`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from tapfl.config import Config
from tapfl.data.layout import FederationFile
from tapfl.data.participants import load_federation, taking_part
from tapfl.model.network import build_network
from tapfl.tasks import Task

# The paper's memory table: averages over clients, without and with TAP's second copy. Its
# percentages are means of the clients' ratios, not ratios of the means; its "GB" are GiB. The
# seconds are those of TAP's stage 2.
PAPER = {
    "flava": {"total": 310_559_996.40, "trainable_percent": 10.3347, "gib": 1.1569,
              "tap_total": 347_422_994.40, "tap_trainable_percent": 18.1086, "tap_gib": 1.2943,
              "tap_seconds": 153.54},
    "vilt": {"total": 186_171_919.0, "trainable_percent": 18.1841, "gib": 0.6935,
             "tap_total": 224_296_094.0, "tap_trainable_percent": 29.7824, "tap_gib": 0.8357,
             "tap_seconds": 79.39},
}
MIB, GIB = 2**20, 2**30


def summarize(config: Config, federation: FederationFile | None = None) -> dict[str, Any]:
    """Count the server's model and every kind of client's, all fp32 in ``bytes``.

    ``federation`` is what the configuration names, where that has been read before.
    """
    federation = taking_part(federation or load_federation(config.federation), config.federation)
    tasks = federation.task_table()
    server = _count(config, tasks)
    blocks = server["blocks"]
    clients = []
    for client in federation.clients:
        own = _count(config, {name: tasks[name] for name in client.tasks})
        clients.append({
            "name": client.name, "tasks": list(client.tasks), "total": own["total"],
            "trainable": own["trainable"], "with_tap": own["total"] + own["trainable"],
            "blocks": sorted(own["blocks"]),
        })
    return {
        "foundation": config.foundation.name, "weights": server["weights"],
        "random": server["random"],
        "backbone": config.backbone.model_dump(), "total": server["total"],
        "trainable": server["trainable"], "frozen": server["frozen"],
        "bytes": 4 * server["total"], "blocks": blocks, "clients": clients,
        "mean": mean_client(clients),
        "paper": PAPER.get(config.foundation.name) if _is_the_papers(config) else None,
    }


def _is_the_papers(config: Config) -> bool:
    """Return whether the model has the shape of the paper's memory table."""
    return (config.backbone.kind == "routed" and config.backbone.layers_per_stage == 1
            and config.foundation.architecture is None)


def kind_of(tasks: Iterable[str]) -> str:
    """Return what clients with the same tasks have in common, as a word."""
    return "+".join(sorted(tasks))


def mean_client(clients: list[dict[str, Any]]) -> dict[str, float]:
    """Average over clients as the paper's table does: percentages are means of ratios."""
    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(clients)

    total, tap_total = (mean(c[key] for c in clients) for key in ("total", "with_tap"))
    return {
        "total": total, "gib": 4 * total / GIB,
        "trainable_percent": 100 * mean(c["trainable"] / c["total"] for c in clients),
        "tap_total": tap_total, "tap_gib": 4 * tap_total / GIB,
        "tap_trainable_percent": 100 * mean(2 * c["trainable"] / c["with_tap"] for c in clients),
    }


def _count(config: Config, tasks: dict[str, Task]) -> dict[str, Any]:
    network = build_network(config, tasks, device="meta")
    blocks = {name: parameters(block) for name, block in sorted(network.blocks.items())}
    frozen = parameters(network.foundation)
    return {"total": frozen + sum(blocks.values()), "trainable": sum(blocks.values()),
            "frozen": frozen, "blocks": blocks, "weights": network.foundation.weights,
            "random": network.foundation.is_random}


def parameters(module: nn.Module) -> int:
    """Return the number of parameters; one that is used in two places counts once."""
    return sum(p.numel() for p in module.parameters())


def render(summary: dict[str, Any], preset: str) -> str:
    """Return the summary as a table to read."""
    lines = [
        f"{preset}: foundation {summary['foundation']} (weights: {summary['weights']}), "
        f"backbone {summary['backbone']['kind']}, "
        f"{summary['backbone']['layers_per_stage']} layer(s) per stage",
        "",
        f"{'server':<34}{'parameters':>14}{'GiB (fp32)':>12}",
    ]
    for name in ("total", "frozen", "trainable"):
        lines.append(f"  {name:<32}{summary[name]:>14,}{summary[name] * 4 / GIB:>12,.4f}")
    lines += ["", f"{'block':<48}{'parameters':>14}{'MiB (fp32)':>12}{'share of trainable':>20}"]
    for name, count in summary["blocks"].items():
        lines.append(f"  {name:<46}{count:>14,}{count * 4 / MIB:>12,.3f}"
                     f"{count / summary['trainable']:>20.1%}")
    lines += ["", *_clients(summary),
              "", "A process that simulates many clients holds the frozen base once; one more "
                  "client costs its trainable parameters (twice with TAP)."]
    if summary["random"]:
        lines.append("Weights are random: results made with this model say so.")
    return "\n".join(lines)


def _clients(summary: dict[str, Any]) -> list[str]:
    """Return a row for every client, their mean, and the paper's mean next to it."""
    lines = [f"{'client':<8}{'total':>14}{'trainable':>13}{'%':>8}{'with TAP':>14}{'%':>8}"
             f"{'GiB':>9}{'GiB TAP':>9}  tasks"]
    for client in summary["clients"]:
        row = _row(client["name"], mean_client([client]))
        lines.append(f"{row}  {', '.join(client['tasks'])}")
    lines.append(_row("mean", summary["mean"]) + "  (%: mean of ratios)")
    if summary["paper"]:
        lines += [_row("paper", summary["paper"]) + "  (%: mean of ratios)",
                  "paper: its mean client; totals, percentages and memory (its GB are GiB) as "
                  "published, trainable is the difference of its two totals."]
    return lines


def _row(name: str, of: dict[str, float]) -> str:
    trainable = of["tap_total"] - of["total"]  # TAP keeps a second copy of what trains
    return (f"{name:<8}{of['total']:>14,.0f}{trainable:>13,.0f}{of['trainable_percent']:>8.2f}"
            f"{of['tap_total']:>14,.0f}{of['tap_trainable_percent']:>8.2f}"
            f"{of['gib']:>9.4f}{of['tap_gib']:>9.4f}")
