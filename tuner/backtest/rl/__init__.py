"""Backtests of published steps of reinforcement learning."""
