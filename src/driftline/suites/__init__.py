"""Test suites that users run with `pytest --pyargs`: named decoders, validated or expected of.

Documents name these modules, and test files of users import from them: their names must stay.
"""
