"""The documented address of the decoder suites, `pytest --pyargs driftline.suites.test_decoders`.

They live in `driftline.decoding.pytest_suites`; test files of users import them from here.
"""
