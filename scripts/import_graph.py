"""No room imports a higher one: python scripts/import_graph.py [--print]

Rooms are the packages and modules of tapfl, lowest first. A module may import its own room and
lower ones, at the top of a file or inside a function.
"""

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "tapfl"
ROOMS = [
    {"tapfl"},  # the package itself: its version
    {"errors"}, {"reading", "tasks", "events", "verbs"}, {"settings"},
    {"blocks", "config"},
    {"methods", "kernels", "privacy"}, {"data"}, {"model"}, {"federated"}, {"personal"},
    {"evaluation"}, {"engine"}, {"use"}, {"report"}, {"experiments"},
    {"pretrain", "bench", "deploy", "theory"}, {"cli"}, {"__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def level(module: str) -> int:
    return LEVEL.get(room(module), len(ROOMS))


def imports(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno


def faults() -> list[str]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if module == "tapfl":
            continue  # imports its public names when they are used
        if room(module) not in LEVEL:
            found.append(f"{path.name}: room '{room(module)}' has no place in ROOMS")
        for target, line in imports(ast.parse(path.read_text())):
            if target.split(".")[0] == "tapfl" and level(target) > level(module):
                found.append(f"{path.relative_to(PACKAGE)}:{line}: {module} imports {target}, "
                             "which is in a higher room")
    return found


if __name__ == "__main__":
    problems = faults()
    if "--print" in sys.argv:
        print(" < ".join(" ".join(sorted(rooms)) for rooms in ROOMS))
    print("\n".join(problems) or "no room imports a higher one")
    sys.exit(bool(problems))
