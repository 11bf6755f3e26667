"""Two trainings step by step: loss, gradients, update, weights, and where they part.

Reads what captures have written of steps and judges it in the order in which a step happens. Knows
no limits of rows and reads no tensor of the index.
"""
