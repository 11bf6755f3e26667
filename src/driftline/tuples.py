"""`NamedTuple`, made quickly: what one command loads has fifty of them.

Where annotations are text, `typing` compiles that of each field, to look at what nobody asks for:
two thirds of the time that such a class takes. Here they stay text, which `typing.get_type_hints`
reads as ever. To type checkers it is `typing.NamedTuple`.
"""

from __future__ import annotations

from collections import namedtuple

TYPE_CHECKING = False  # what `typing` calls it
if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
else:

    class _Maker(type):
        def __new__(cls, name, bases, body):
            if not bases:
                return super().__new__(cls, name, bases, body)
            fields = body.pop("__annotations__", {})
            defaults = [body.pop(field) for field in fields if field in body]
            made = namedtuple(name, fields, defaults=defaults, module=body.pop("__module__"))
            made.__annotations__ = made.__new__.__annotations__ = fields
            for attribute, value in body.items():
                setattr(made, attribute, value)
            return made

    class NamedTuple(metaclass=_Maker):
        """What is derived from it is a tuple, and not this."""
