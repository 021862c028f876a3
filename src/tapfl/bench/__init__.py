"""The bench: what tapfl costs on this machine, measured now (`tapfl bench`).

Every benchmark is a module with a function ``run(config, device, quick, **options) -> Report``;
``command.py`` is their command line, ``measure.py`` what they share.
"""
