"""Where attention does look: statistics of queries and keys, and of hidden states."""

from locater.measure.attention import AttentionStatistics, attention_statistics
from locater.measure.tokens import rank_residual

__all__ = ["AttentionStatistics", "attention_statistics", "rank_residual"]
