"""Dispatch rules of runtimes: which replica each token copy goes to."""
