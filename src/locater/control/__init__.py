"""How do I move where attention looks?"""

from locater.control.decoupled import DecoupledLocAteR
from locater.control.locater import LocAteR
from locater.control.locater_method import DecoupledLocAteRMethod, LocAteRMethod
from locater.control.method import Applied, Method, applied
from locater.control.qk_clip import QKClip
from locater.control.qk_decay import QKDecay
from locater.control.qk_norm import QKNorm
from locater.control.sigma_reparam import SigmaReparam
from locater.control.softcap import Softcap
from locater.control.stacked import penalty_gradient
from locater.control.z_loss import ZLoss

__all__ = [
    "Applied",
    "DecoupledLocAteR",
    "DecoupledLocAteRMethod",
    "LocAteR",
    "LocAteRMethod",
    "Method",
    "QKClip",
    "QKDecay",
    "QKNorm",
    "SigmaReparam",
    "Softcap",
    "ZLoss",
    "applied",
    "penalty_gradient",
]
