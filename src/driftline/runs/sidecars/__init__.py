"""Side files of a run: operator calls and tables, facts about models, and about training steps.

They say what a program is made of and did besides the tensors of the index. Nothing here compares.
"""
