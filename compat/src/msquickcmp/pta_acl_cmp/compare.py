"""The labels, as their document imports them."""

from driftline import gen_id, set_label, set_task_id

__all__ = ["gen_id", "set_label", "set_task_id"]
