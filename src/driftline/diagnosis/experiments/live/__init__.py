"""The part of experiments that runs inside the program: replay and repetition of torch modules.

Nothing here may change what the program computes, draws or stores.
"""
