"""How do I move where attention looks?"""

from locater.control.locater import LocAteR
from locater.control.stacked import penalty_gradient

__all__ = ["LocAteR", "penalty_gradient"]
