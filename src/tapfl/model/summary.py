"""Count a model's parameters, without weights and without memory (`tapfl model`)."""

from __future__ import annotations

from typing import Any

from torch import nn

from tapfl.config import Config
from tapfl.data.federation import load_federation
from tapfl.model.network import build_network
from tapfl.tasks import Task

# The paper's memory table: averages over clients, without and with TAP's second copy.
PAPER = {
    "flava": {"total": 310_559_996.40, "trainable_percent": 10.3347, "gigabytes": 1.1569,
              "tap_total": 347_422_994.40, "tap_trainable_percent": 18.1086,
              "tap_gigabytes": 1.2943},
    "vilt": {"total": 186_171_919.0, "trainable_percent": 18.1841, "gigabytes": 0.6935,
             "tap_total": 224_296_094.0, "tap_trainable_percent": 29.7824,
             "tap_gigabytes": 0.8357},
}


def summarize(config: Config) -> dict[str, Any]:
    """Count the server's model and every kind of client's, all fp32 in ``bytes``."""
    federation = load_federation(config.federation)
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
        "paper": PAPER.get(config.foundation.name)
        if config.backbone.kind == "routed" and config.backbone.layers_per_stage == 1 else None,
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
        f"{'server':<34}{'parameters':>14}{'MB (fp32)':>12}",
    ]
    for name in ("total", "frozen", "trainable"):
        lines.append(f"  {name:<32}{summary[name]:>14,}{summary[name] * 4 / 1e6:>12,.1f}")
    lines += ["", f"{'block':<48}{'parameters':>14}{'MB (fp32)':>12}{'share of trainable':>20}"]
    for name, count in summary["blocks"].items():
        lines.append(f"  {name:<46}{count:>14,}{count * 4 / 1e6:>12,.3f}"
                     f"{count / summary['trainable']:>20.1%}")
    lines += ["", f"{'client':<8}{'total':>14}{'trainable':>13}{'%':>7}{'with TAP':>14}{'%':>7}"
                  f"{'MB':>9}{'MB TAP':>9}  tasks"]
    for client in summary["clients"]:
        lines.append(_row(client["name"], client["total"], client["trainable"],
                          client["with_tap"], 2 * client["trainable"] / client["with_tap"])
                     + "  " + ", ".join(client["tasks"]))
    count = len(summary["clients"])
    mean = {k: sum(c[k] for c in summary["clients"]) / count
            for k in ("total", "trainable", "with_tap")}
    lines.append(_row("mean", mean["total"], mean["trainable"], mean["with_tap"],
                      2 * mean["trainable"] / mean["with_tap"]))
    paper = summary["paper"]
    if paper:
        lines.append(_row("paper", paper["total"],
                          paper["total"] * paper["trainable_percent"] / 100, paper["tap_total"],
                          paper["tap_trainable_percent"] / 100) + "  (mean client, as published)")
    lines += ["", "A process that simulates many clients holds the frozen base once; one more "
                  "client costs its trainable parameters (twice with TAP)."]
    if summary["random"]:
        lines.append("Weights are random: results made with this model say so.")
    return "\n".join(lines)


def _row(name: str, total: float, trainable: float, with_tap: float, tap_share: float) -> str:
    return (f"{name:<8}{total:>14,.0f}{trainable:>13,.0f}{trainable / total:>7.1%}"
            f"{with_tap:>14,.0f}{tap_share:>7.1%}{total * 4 / 1e6:>9,.1f}"
            f"{with_tap * 4 / 1e6:>9,.1f}")
