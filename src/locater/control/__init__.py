"""How do I move where attention looks?"""

from locater.control.locater import LocAteR

__all__ = ["LocAteR"]
