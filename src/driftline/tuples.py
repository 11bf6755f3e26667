"""`NamedTuple`, made quickly: what one command loads has fifty of them.

Where annotations are text, `typing` compiles that of each field, to look at what nobody asks for:
two thirds of the time that such a class takes. Here they stay text, which `typing.get_type_hints`
reads as ever. Of the rest, half is the constructor, which is compiled, too: here when more than a
few tuples are made, and most classes that a command loads never have as many. To type checkers it
is `typing.NamedTuple`.
"""

from __future__ import annotations

from collections import namedtuple

TYPE_CHECKING = False  # what `typing` calls it
if TYPE_CHECKING:
    from typing import Any
    from typing import NamedTuple as NamedTuple
else:
    from collections import _tuplegetter as _field

    _FEW = 24  # of them take as long as to compile a constructor

    class _Constructor:
        """Stands for `__new__`, and fills tuples by itself, until it was asked for often."""

        made: type
        asked = 0

        def __get__(self, instance, owner):
            self.asked += 1
            return self if self.asked <= _FEW else self.usual

        def __call__(self, cls, *values, **named):
            names, defaults = self.made._fields[len(values) :], self.made._field_defaults
            if named.keys() <= set(names) and defaults.keys() | named.keys() >= set(names):
                more = [named[name] if name in named else defaults[name] for name in names]
                if len(values) + len(more) == len(self.made._fields):
                    return filled(cls, (*values, *more))
            return self.usual(cls, *values, **named)  # which has words for what is wrong

        @property
        def usual(self):
            made = self.made  # not `owner`, which may be derived from it
            defaults = made._field_defaults.values()
            usual = namedtuple(made.__name__, made._fields, defaults=defaults)
            usual.__new__.__annotations__ = made.__annotations__
            usual.__new__.__qualname__ = f"{made.__name__}.__new__"
            made.__new__ = usual.__new__
            return usual.__new__

        @property
        def __signature__(self):
            import inspect

            return inspect.signature(self.usual)

    def _make(cls, values):
        made = tuple.__new__(cls, values)
        if len(made) != len(cls._fields):
            raise TypeError(f"Expected {len(cls._fields)} arguments, got {len(made)}")
        return made

    def _replace(self, /, **values):
        made = self._make(map(values.pop, self._fields, self))
        if values:
            raise ValueError(f"Got unexpected field names: {list(values)!r}")
        return made

    def __repr__(self):
        fields = zip(self._fields, self, strict=True)
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in fields)})"

    def _asdict(self):
        return dict(zip(self._fields, self, strict=True))

    def __getnewargs__(self):
        return tuple(self)

    _SHARED = {
        "__slots__": (),
        "_make": classmethod(_make),
        "_replace": _replace,
        "_asdict": _asdict,
        "__repr__": __repr__,
        "__getnewargs__": __getnewargs__,
    }

    class _Maker(type):
        def __new__(cls, name, bases, body):
            if not bases:
                return super().__new__(cls, name, bases, body)
            names = tuple(body.get("__annotations__", ()))
            defaults = {field: body.pop(field) for field in names if field in body}
            ours = {
                **_SHARED,
                **{
                    field: _field(at, f"Alias for field number {at}")
                    for at, field in enumerate(names)
                },
                "_fields": names,
                "__match_args__": names,
                "_field_defaults": defaults,
                "__new__": (constructor := _Constructor()),
            }
            constructor.made = type(name, (tuple,), ours | body)
            return constructor.made

    class NamedTuple(metaclass=_Maker):
        """What is derived from it is a tuple, and not this."""


filled: Any = getattr(tuple, "__new__")  # noqa: B009 - said plainly its type is half unknown
"""A tuple of a class from all of its values: a quarter of what a constructor takes."""
