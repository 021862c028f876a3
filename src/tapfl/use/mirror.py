"""`--data DIR`: a folder that mirrors the hub's data sets, for configurations that read them."""

from __future__ import annotations

from pathlib import Path

from tapfl.config import Config
from tapfl.data.participants import load_federation, taking_part
from tapfl.errors import TapflError


def with_mirror(config: Config, given: Path | str | None) -> Config:
    """Return the configuration with its data in a folder, if one is given."""
    if given is None:
        return config
    check_folder(given)
    refuse_unread(config, given)
    return config.with_data(str(given))


def check_folder(given: Path | str, name: str = "--data") -> None:
    """Refuse what is no folder; an empty text is none, though it could stand for this one."""
    if not str(given) or not Path(given).is_dir():
        raise TapflError(f"{name} {given}: " + ("expected a folder, not a file"
                                                if Path(given).is_file() else "no such folder"))


def refuse_unread(config: Config, given: Path | str, who: str = "this configuration") -> None:
    """Refuse a ``--data`` that nothing would be read from: whoever gives it expects it to count."""
    why = unread(config)
    if why is not None:
        raise TapflError(f"--data {given}: {who} reads no data folder: {why}; omit --data")


def unread(config: Config) -> str | None:
    """Say why nothing would be read from a mirror, if that is so."""
    federation = taking_part(load_federation(config.federation), config.federation)
    own = federation.own_data(Path())
    named = [*own.tasks.values(), *(e for each in own.clients.values() for e in each.values())]
    others = set(federation.tasks) - {*own.tasks, *own.clients}
    if any(entry.hub for entry in named) or (others and config.data.source == "hub"):
        return None
    if others:
        return f"its data are made (data.source: {config.data.source})"
    return "its federation file names the files"
