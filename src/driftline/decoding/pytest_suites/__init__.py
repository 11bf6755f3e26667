"""Test suites that users run with `pytest --pyargs`: named decoders, validated or expected of.

Users know them as `driftline.suites`, which imports them from here.
"""
