"""Settings of a user's own classes: declared by the class, found in the configuration."""

from __future__ import annotations

from typing import Any, ClassVar

from tapfl.config import Config, Section
from tapfl.errors import TapflError
from tapfl.reading import check


class Configurable:
    """A class that may declare ``Settings``, a Section whose values stand under ``own.ClassName``.

        class Prox(FedAvg):
            class Settings(Section):
                mu: float = 0.1

    ``self.settings.mu`` is then 0.1, or what ``--set own.Prox.mu=1`` says.
    """

    Settings: ClassVar[type[Section]] = Section
    # Whether its losses are sums over samples and tasks: minibatches may then go in pieces
    # (``speed.micro_batch``). A class of one's own has to say so itself.
    splits_batches: ClassVar[bool] = True
    settings: Any

    @classmethod
    def read_settings(cls, config: Config) -> Section:
        """Return the class's settings, validated."""
        if not (isinstance(cls.Settings, type) and issubclass(cls.Settings, Section)):
            raise TapflError(f"{cls.__module__}:{cls.__name__}: Settings: expected a class derived "
                             "from tapfl.config.Section")
        return check(cls.Settings, config.own.get(cls.__name__, {}), f"own.{cls.__name__}")
