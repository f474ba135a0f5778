"""Andon: data-parallel pretraining that stops the line."""

from typing import TYPE_CHECKING, Any

from andon.version import VERSION as __version__

__all__ = ["DataParallel", "JidokaHalt", "__version__", "join"]

if TYPE_CHECKING:
    from andon.engine.parallel import DataParallel, join
    from andon.integrity.halt import JidokaHalt


def __getattr__(name: str) -> Any:
    """The Python door is opened when it is used: the command line starts without torch."""
    if name in ("DataParallel", "join"):
        from andon.engine import parallel

        return getattr(parallel, name)
    if name == "JidokaHalt":
        from andon.integrity.halt import JidokaHalt

        return JidokaHalt
    raise AttributeError(f"module 'andon' has no attribute {name!r}")
