"""Capture of Paddle layers."""
