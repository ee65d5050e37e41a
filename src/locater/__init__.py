"""See, predict and control where a transformer's attention looks."""

from typing import TYPE_CHECKING, Any

from locater import theory
from locater.errors import LocaterError
from locater.theory import TokenProcess, rho

if TYPE_CHECKING:
    from locater.control import LocAteR
    from locater.measure import observe
    from locater.models import scan
    from locater.qk import QK

__version__ = "0.1.0"

__all__ = ["QK", "LocAteR", "LocaterError", "TokenProcess", "__version__", "observe", "rho", "scan", "theory"]

# Names that need torch are imported when they are first used: the theory and the command line start without it.
_NEEDS_TORCH = {
    "QK": "locater.qk",
    "LocAteR": "locater.control",
    "scan": "locater.models",
    "observe": "locater.measure",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in ("control", "lab", "measure", "models"):
        return import_module(f"locater.{name}")
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module 'locater' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_NEEDS_TORCH[name]), name)
    return value
