"""Prediction of a launch of a serving engine, and the smallest change that beats it."""
