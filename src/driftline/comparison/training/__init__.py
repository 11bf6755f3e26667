"""Two trainings compared step by step: loss, gradients, update, weights, and where they diverge.

It reads the facts that captures wrote about steps, and judges them in the order of a step. It knows
no limits of rows and reads no tensor of the index.
"""
