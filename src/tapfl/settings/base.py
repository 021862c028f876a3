"""What every section of a configuration is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from tapfl.reading import path_text

# Upper bounds are far above what anybody trains with; beyond them, numbers overflow or a typing
# error would only show after hours.
MANY = 1_000_000  # rounds, steps, clients
WIDE = 65_536  # samples of a batch, tokens of an answer
SAMPLES = 100_000_000  # of a data set; a larger weight would silence all others
SEED = 2**63 - 1  # what NumPy and PyTorch both take
WEIGHT = 1e9  # factors and thresholds

PathText = Annotated[str, AfterValidator(path_text)]


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, values are fixed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
