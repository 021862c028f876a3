"""Raw samples: what a data set gives before it becomes tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass
class Samples:
    """Raw samples of one split: pictures, texts, labels or answers, as the task has them."""

    images: NDArray[np.uint8] | None = None  # (N, 3, 64, 64)
    texts: list[str] | None = None
    labels: list[int] | None = None
    answers: list[str] | None = None
    classes: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        for values in (self.images, self.texts):
            if values is not None:
                return len(values)
        return 0

    def slice(self, start: int, stop: int) -> Samples:
        """Return samples ``start`` to ``stop``."""
        def cut(values: Any) -> Any:
            return None if values is None else values[start:stop]

        return Samples(cut(self.images), cut(self.texts), cut(self.labels), cut(self.answers),
                       self.classes)
