"""Experiments: a program is run again to learn more, by replay, noise, repetition or bisection."""
