"""Dumps of GE, the Ascend graph engine, and of torchair's FX mode."""
