"""The part of an experiment that runs inside the program: replay and repetition of torch
modules.
"""
