"""Experiments: run a program again to learn more, by replay, noise, repetition or bisection."""
