"""The interface of the labelled comparison between an acceleration library and PyTorch."""
