"""What attention does while a model runs: statistics of queries and keys, and of hidden states."""

from locater.measure._moments import Covariances
from locater.measure.alarms import Alarm, Alarms, Thresholds, alarms_between, alarms_of
from locater.measure.attention import AttentionStatistics, attention_statistics, signal_propagation
from locater.measure.doctor import Diagnosis, Finding, doctor
from locater.measure.largest import max_logits
from locater.measure.observe import Observation, observe
from locater.measure.predict import Agreement, AttentionPrediction, Prediction, agreement, predict
from locater.measure.tokens import rank_residual

__all__ = [
    "Agreement",
    "Alarm",
    "Alarms",
    "AttentionPrediction",
    "AttentionStatistics",
    "Covariances",
    "Diagnosis",
    "Finding",
    "Observation",
    "Prediction",
    "Thresholds",
    "agreement",
    "alarms_between",
    "alarms_of",
    "attention_statistics",
    "doctor",
    "max_logits",
    "observe",
    "predict",
    "rank_residual",
    "signal_propagation",
]
