"""No class of the engine overrides a concrete method of another one: such methods are abstract or final."""

import importlib
import inspect
import pkgutil

import pytest

from headwater.store.tier import ElsewhereTier, Tier


def classes_of(package):
    """Yield every class that a module of a package defines."""
    for info in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        module = importlib.import_module(info.name)
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__ == info.name:
                yield value


def is_concrete(member):
    """True for a method or property that is written in Python and is not abstract."""
    if getattr(member, "__isabstractmethod__", False):
        return False
    for wrapper in ("__func__", "fget"):  # of class methods and static methods, and of properties
        member = getattr(member, wrapper, member)
    return inspect.isfunction(member)


def overrides_in(cls):
    """Yield the names of the methods of a class that replace a concrete one of a class of this project."""
    for name, member in vars(cls).items():
        if name == "__init__" or not is_concrete(member):
            continue
        bases = [base for base in cls.__mro__[1:] if name in vars(base)]
        if bases and bases[0].__module__.startswith("headwater.") and is_concrete(vars(bases[0])[name]):
            yield f"{cls.__qualname__}.{name} replaces that of {bases[0].__qualname__}"


@pytest.mark.parametrize("package", ["headwater.store", "headwater.stream"])
def test_no_class_overrides_a_concrete_method(package):
    classes = list(classes_of(package))
    assert len(classes) > 20
    assert [each for cls in classes for each in overrides_in(cls)] == []


def test_an_override_is_found():
    class Base(Tier):
        def settle(self):
            pass

        @property
        def size(self):
            return 1

    Base.__module__ = "headwater.store.example"

    class Child(Base):
        def settle(self):
            pass

        @property
        def size(self):
            return 2

        def close(self):
            pass

    names = [each.split(" ")[0].rpartition(".")[2] for each in overrides_in(Child)]
    assert names == ["settle", "size"]
    assert list(overrides_in(ElsewhereTier)) == []
