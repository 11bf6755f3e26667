"""Side files of a run: operator calls and tables, facts about models, and about training steps.

They describe what a program consists of and did, beyond the tensors of the index. Nothing here
compares.
"""
