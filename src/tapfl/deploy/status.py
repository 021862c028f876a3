"""What an operator wants to know of a server: nodes, rounds, traffic, refusals."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tapfl.deploy.processes import recorded
from tapfl.deploy.server import BELOW
from tapfl.deploy.supervise import AGAIN
from tapfl.errors import TapflError

# Lines of the server's own; others quote what a node has said, which may be anything.
JOINED = re.compile(r"node \d+ joined with ")
QUOTED = re.compile(r"refused: |node \d+: ")


def status(out: Path) -> dict[str, Any]:
    """Return where the run in a server's folder stands."""
    folder = out / BELOW
    log = folder / "log.jsonl"
    if not log.is_file():
        raise TapflError(f"{out}: no deployment was started here ({log} is missing)")
    said = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()
            if line.endswith("}")]
    rounds = [line for line in said if "round" in line and "cohort" in line]
    texts = [line["says"] for line in said if "says" in line]
    last = rounds[-1] if rounds else None
    return {
        "state": _state(texts), "processes": sorted(recorded(folder)),
        "nodes": [text for text in texts if JOINED.match(text)],
        "refused": [text for text in texts if text.startswith("refused: ")],
        "restarts": [text for text in texts if AGAIN in text and not QUOTED.match(text)],
        "method": last and last["method"], "round": last and last["round"],
        "seconds_since": round(time.time() - log.stat().st_mtime, 1),
        "bytes_up": sum(line["bytes_up"] for line in rounds),
        "bytes_down": sum(line["bytes_down"] for line in rounds),
        "missing": [f"round {line['round']}: {line['client']}: {line['reason']}" for line in said
                    if line.get("event") in ("missing", "refused")],
        "left": [f"round {line['round']}: {line['client']} has left" for line in said
                 if line.get("event") == "left"],
        "last": texts[-1] if texts else "",
    }


def _state(texts: Sequence[str]) -> str:
    """Return how it ended, if it was not started again since."""
    for text in reversed(texts):
        if text == "finished" or text.startswith("stopped"):
            return text
        if text in ("starts", "goes on"):
            break
    return "under way"
