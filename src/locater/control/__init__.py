"""How do I move where attention looks?"""

from locater.control.apply import Applied, Method, applied
from locater.control.decoupled import DecoupledLocAteR, DecoupledLocAteRMethod
from locater.control.locater import LocAteR, LocAteRMethod
from locater.control.predicted import predicted_attention
from locater.control.qk_clip import QKClip
from locater.control.qk_decay import QKDecay
from locater.control.qk_norm import QKNorm
from locater.control.rules.locater import penalty_gradient
from locater.control.sigma_reparam import SigmaReparam
from locater.control.softcap import Softcap
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
    "predicted_attention",
]
