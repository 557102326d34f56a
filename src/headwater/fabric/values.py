"""Exchange of values among the members of a mesh: encoded, sent and decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from headwater.fabric.codec import decode, encode

if TYPE_CHECKING:
    from headwater.fabric.mesh import Mesh

Value = TypeVar("Value")


def gather_values(mesh: Mesh, value: Value, kind: Any) -> list[Value]:
    """Send `value` to every member, and return the values of all members.

    Args:
        mesh: the members.
        value: the value of this member.
        kind: the type of the values.
    """
    # The value of this rank is decoded too, so that all ranks have copies of the same kind.
    return [decode(message, kind) for message in mesh.gather(encode(value, kind))]


def exchange_values(mesh: Mesh, values: Sequence[Value], kind: Any) -> list[Value]:
    """Send each member its value, and return what each member sends to this one.

    Args:
        mesh: the members.
        values: the value for each member.
        kind: the type of the values.
    """
    return [decode(message, kind) for message in mesh.exchange([encode(value, kind) for value in values])]


def broadcast_value(mesh: Mesh, value: Value, kind: Any, source: int) -> Value:
    """Return on every member the value of the member `source`.

    Args:
        mesh: the members.
        value: the value of the source; ignored on other members.
        kind: the type of the value.
        source: index of the member that sends.
    """
    message = encode(value, kind) if mesh.own == source else None
    decoded: Value = decode(mesh.broadcast(message, source), kind)
    return decoded
