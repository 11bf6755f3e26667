"""The part of experiments that runs inside the program: replay and repetition of torch modules.

Nothing here may change the program's results, its random numbers or its state.
"""
