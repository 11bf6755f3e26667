"""Kinds of bugs, one family per file.

Each detector examines one site's error and scores how well its kind of bug explains it. A detector
sees only arrays; the guilty site was determined before. `registry.py` lists all detectors.
"""
