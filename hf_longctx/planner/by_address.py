"""Named tuples of arrays that compiled functions pass on as one address.

numba passes a tuple as all that it holds: an array is seven words, so that the ranks and costs of a step are 83. To copy them for
each call took 15 % of the time of plans, and up to 60 %. Here the tuple stays where Python's call has put it, and all that are
called read fields from there:

    call from Python   | speeds: 7 words | capacities: 7 words | node | ...      stays until the call returns
                         ^
    smallest_group(length, ..., address)  ->  equal_time(length, size, address)

Compiled functions read fields of such a tuple and pass it on; they neither make nor return one. Nothing is sent.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.imputils import impl_ret_borrowed
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    NativeValue,
    infer_getattr,
    lower_getattr_generic,
    models,
    register_model,
    typeof_impl,
    unbox,
)

INDEX = ir.IntType(32)
Template: Any = AttributeTemplate


class Address(types.Type):
    """The address of a named tuple, as a type of numba's. `columns`: its type of the tuple itself."""

    def __init__(self, columns: types.NamedTuple) -> None:
        self.columns = columns
        super().__init__(f"Address({columns.name})")


register_model(Address)(models.OpaqueModel)


@infer_getattr
class _Fields(Template):
    """Types of the fields."""

    key = Address

    def generic_resolve(self, address: Address, name: str) -> types.Type | None:
        columns = address.columns
        return columns.types[columns.fields.index(name)] if name in columns.fields else None


@lower_getattr_generic(Address)
def _field(context: Any, builder: Any, kind: Address, address: Any, name: str) -> Any:
    columns = kind.columns
    index = columns.fields.index(name)
    pointer = builder.bitcast(address, context.get_value_type(columns).as_pointer())
    field = builder.load(builder.gep(pointer, [INDEX(0), INDEX(index)], inbounds=True))
    return impl_ret_borrowed(context, builder, columns.types[index], field)


@unbox(Address)
def _from_python(kind: Address, value: Any, c: Any) -> NativeValue:
    native = c.unbox(kind.columns, value)

    def give_back() -> None:
        if native.cleanup is not None:
            native.cleanup()
        # References to its arrays: numba knows of them only where it is passed the tuple itself.
        if c.context.enable_nrt:
            c.context.nrt.decref(c.builder, kind.columns, native.value)

    pointer = cgutils.alloca_once_value(c.builder, native.value)
    address = c.builder.bitcast(pointer, cgutils.voidptr_t)
    return NativeValue(address, is_error=native.is_error, cleanup=give_back)


@cache
def take_as_address(columns: type) -> None:
    """Take named tuples of this class, whenever one comes from Python, as addresses."""

    def address_of(value: Any, c: Any) -> Address:
        return Address(types.NamedTuple([typeof_impl(field, c) for field in value], columns))

    typeof_impl.register(columns)(address_of)
