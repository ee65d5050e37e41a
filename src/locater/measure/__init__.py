"""Where attention does look: statistics of queries and keys, and of hidden states."""

from locater.measure.attention import AttentionStatistics, attention_statistics, signal_propagation
from locater.measure.observe import Observation, observe
from locater.measure.predict import Prediction, predict
from locater.measure.tokens import rank_residual

__all__ = [
    "AttentionStatistics",
    "Observation",
    "Prediction",
    "attention_statistics",
    "observe",
    "predict",
    "rank_residual",
    "signal_propagation",
]
