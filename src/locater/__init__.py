"""See, predict and control where a transformer's attention looks."""

from locater import theory
from locater.errors import LocaterError
from locater.qk import QK
from locater.theory import TokenProcess, rho

__version__ = "0.1.0"

__all__ = ["QK", "LocaterError", "TokenProcess", "__version__", "rho", "theory"]
