"""Decoding: metrics, layers and validation of text models on prompts."""
