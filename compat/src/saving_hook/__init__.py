"""`saving_hook`, under both names that its document gives to its one function."""

from driftline import register_saving_hook

register_hook = register_saving_hook

__all__ = ["register_hook", "register_saving_hook"]
