"""Given a spectrum, what does softmax attention do, and what is the paper's ρ? numpy and scipy only."""

from locater.theory.attention import AttentionLaw, attention, attention_from_traces, trace_for_entropy
from locater.theory.bounds import (
    Chain,
    eigenvalue_variance,
    entropy_lower_bound,
    entropy_nu,
    rank_bound,
    scale_bound,
    trace_bound,
)
from locater.theory.collapse import DepthProfile, attention_entropy, rank_over_depth, rank_residual
from locater.theory.depth import (
    DepthLaw,
    RandomAttention,
    RandomLinear,
    RandomMLP,
    RandomTransformer,
    depth_law,
    token_gram,
)
from locater.theory.gaussian_attention import attention_from_gaussian
from locater.theory.gradient import OneLayer, QKGradient
from locater.theory.kernels import ACTIVATIONS, activation_kernel
from locater.theory.law import logit_form, rho_from_gaussian
from locater.theory.layer import AttentionLayer, LayerClosure, LayerLaw
from locater.theory.lemmas import Lemma3, Lemma4, equation_22, lemma_3, lemma_4
from locater.theory.price import AttentionGradient, attention_gradient
from locater.theory.process import TokenProcess
from locater.theory.quadratic import QuadraticForm
from locater.theory.random_energy import LongLimit, long_limit
from locater.theory.regime import REGIMES, regime, regime_map, regime_map_at, spectrum_at
from locater.theory.rho import Moments, focus_limit, moments, normal_spectrum, rho, rho_curve, rho_curve_slope
from locater.theory.simulate import Simulation, simulate
from locater.theory.softmax import PiecewiseSoftmax, piecewise_softmax, softmax, sparsemax
from locater.theory.softmax_regime import (
    ATTENTION_REGIMES,
    AttentionMap,
    AttentionRegime,
    attention_map,
    attention_regime,
    independent_regimes,
)
from locater.theory.studies import STUDIES, Study
from locater.theory.trainability import Trainability, TrainabilityMap, trainability, trainability_map

__all__ = [
    "ACTIVATIONS",
    "ATTENTION_REGIMES",
    "REGIMES",
    "STUDIES",
    "AttentionGradient",
    "AttentionLaw",
    "AttentionLayer",
    "AttentionMap",
    "AttentionRegime",
    "Chain",
    "DepthLaw",
    "DepthProfile",
    "LayerClosure",
    "LayerLaw",
    "Lemma3",
    "Lemma4",
    "LongLimit",
    "Moments",
    "OneLayer",
    "PiecewiseSoftmax",
    "QKGradient",
    "QuadraticForm",
    "RandomAttention",
    "RandomLinear",
    "RandomMLP",
    "RandomTransformer",
    "Simulation",
    "Study",
    "TokenProcess",
    "Trainability",
    "TrainabilityMap",
    "activation_kernel",
    "attention",
    "attention_entropy",
    "attention_from_gaussian",
    "attention_from_traces",
    "attention_gradient",
    "attention_map",
    "attention_regime",
    "depth_law",
    "eigenvalue_variance",
    "entropy_lower_bound",
    "entropy_nu",
    "equation_22",
    "focus_limit",
    "independent_regimes",
    "lemma_3",
    "lemma_4",
    "logit_form",
    "long_limit",
    "moments",
    "normal_spectrum",
    "piecewise_softmax",
    "rank_bound",
    "rank_over_depth",
    "rank_residual",
    "regime",
    "regime_map",
    "regime_map_at",
    "rho",
    "rho_curve",
    "rho_curve_slope",
    "rho_from_gaussian",
    "scale_bound",
    "simulate",
    "softmax",
    "sparsemax",
    "spectrum_at",
    "token_gram",
    "trace_bound",
    "trace_for_entropy",
    "trainability",
    "trainability_map",
]
