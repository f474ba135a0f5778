"""Andon: data-parallel pretraining that stops the line."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from andon.version import VERSION as __version__

__all__ = ["AdamW", "DataParallel", "JidokaHalt", "Optimizer", "__version__", "digest", "init", "load", "mean", "save"]

if TYPE_CHECKING:
    from andon.cluster.scripts.init import init
    from andon.engine.optimizer import AdamW, Optimizer
    from andon.engine.parallel import DataParallel
    from andon.integrity.halt import JidokaHalt
    from andon.run.script import digest, load, save
    from andon.transport.mean import mean

_HOMES = {
    "AdamW": "engine.optimizer",
    "DataParallel": "engine.parallel",
    "JidokaHalt": "integrity.halt",
    "Optimizer": "engine.optimizer",
    "digest": "run.script",
    "init": "cluster.scripts.init",
    "load": "run.script",
    "mean": "transport.mean",
    "save": "run.script",
}


def __getattr__(name: str) -> Any:
    """Load the Python interface when it is used, so that the command line starts without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'andon' has no attribute {name!r}")
    return getattr(import_module(f"andon.{_HOMES[name]}"), name)
