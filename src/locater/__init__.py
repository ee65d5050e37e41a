"""See, predict and control where a transformer's attention looks."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from locater import theory
    from locater.control import LocAteR
    from locater.errors import LocaterError
    from locater.measure import doctor, observe
    from locater.models import scan
    from locater.qk import QK
    from locater.theory import TokenProcess, rho

__version__ = "0.1.0"

__all__ = ["QK", "LocAteR", "LocaterError", "TokenProcess", "__version__", "doctor", "observe", "rho", "scan", "theory"]

# Names are imported when they are first used: the theory starts without torch, and the command line without either.
_ROOMS = ("control", "lab", "measure", "models", "theory")
_FROM = {
    "LocAteR": "control",
    "LocaterError": "errors",
    "QK": "qk",
    "TokenProcess": "theory",
    "doctor": "measure",
    "observe": "measure",
    "rho": "theory",
    "scan": "models",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _ROOMS:
        return import_module(f"locater.{name}")
    if name not in _FROM:
        raise AttributeError(f"module 'locater' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"locater.{_FROM[name]}"), name)
    return value
