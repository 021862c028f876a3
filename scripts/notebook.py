"""Execute the notebooks of the documentation: python scripts/notebook.py [--write]

Every notebook runs from top to bottom in an empty folder; a cell that fails is an error.
``--write`` keeps the outputs in the file.
"""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent.parent / "docs" / "notebooks"


def main() -> int:
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory(prefix="tapfl-notebook-") as folder:
            os.environ["IPYTHONDIR"] = f"{folder}/.ipython"  # not what the user has set up
            NotebookClient(notebook, timeout=900, record_timing=False,
                           resources={"metadata": {"path": folder}}).execute()
        nbformat.validate(notebook)
        if "--write" in sys.argv:
            notebook.metadata.pop("language_info", None)  # says which Python it was
            for cell in notebook.cells:  # what goes to stderr are warnings about this machine
                if cell.cell_type == "code":
                    cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
            nbformat.write(notebook, path)
        print(f"executed: {path.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
