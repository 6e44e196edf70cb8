"""Groups of arguments inside a kernel: `borrowed` makes a pointer of a group, which is cheap to pass on.

    @kernel("int64(RingStack)")
    def rows_sent(rings):
        return sum_of_rows(borrowed(RingStack, rings))

A tuple of arrays has all their shapes and strides, and every function that it is passed to counts
references to each array. A borrowed group is one pointer; its members are read where they are used. Its
arrays belong to the caller of the kernel, which keeps them: they must not be returned. Only a kernel borrows,
and only from its arguments; all these arrays are contiguous.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import intrinsic, register_model
from numba.np.arrayobj import populate_array

from anyep.backends.cpu.kernels.groups import members_of

_WORD = ir.IntType(64)
_BYTES = cgutils.voidptr_t


class Borrowed(types.Type):
    """A pointer to the members of a group: of an array its address and its shape."""

    def __init__(self, group: Any) -> None:
        self.members = members_of(group)
        super().__init__(f"Borrowed({group.__name__})")

    def place_of(self, name: str) -> int:
        """The index of a member's first word."""
        place = 0
        for other, member in self.members.items():
            if other == name:
                break
            place += _num_words(member)
        return place

    @property
    def num_words(self) -> int:
        return sum(_num_words(member) for member in self.members.values())


def _num_words(member: Any) -> int:
    return 1 + member.ndim if isinstance(member, types.Array) else 1


register_model(Borrowed)(models.OpaqueModel)


@intrinsic
def borrowed(typing_context: Any, group: Any, members: Any) -> Any:
    """A pointer to the members of a group, for the time of the kernel's call."""
    pointer = Borrowed(group.instance_class)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words = cgutils.alloca_once(builder, ir.ArrayType(_WORD, pointer.num_words))
        place = 0
        for index, member in enumerate(pointer.members.values()):
            value = builder.extract_value(arguments[1], index)
            values = [value]
            if isinstance(member, types.Array):
                array = context.make_array(member)(context, builder, value)
                values = [
                    builder.ptrtoint(array.data, _WORD),
                    *cgutils.unpack_tuple(builder, array.shape, member.ndim),
                ]
            for each in values:
                builder.store(each, cgutils.gep_inbounds(builder, words, 0, place))
                place += 1
        return builder.bitcast(words, _BYTES)

    return pointer(group, members), generate


@infer_getattr
class _Members(AttributeTemplate):
    key = Borrowed

    def generic_resolve(self, pointer: Any, name: str) -> Any:  # type: ignore[override]
        return pointer.members.get(name)


@lower_getattr_generic(Borrowed)
def _read_member(context: Any, builder: Any, pointer: Any, value: Any, name: str) -> Any:
    words = builder.bitcast(value, _WORD.as_pointer())
    member, place = pointer.members[name], pointer.place_of(name)

    def word(index: int) -> Any:
        return builder.load(builder.gep(words, [ir.Constant(_WORD, place + index)], inbounds=True))

    if not isinstance(member, types.Array):
        return word(0)
    array = context.make_array(member)(context, builder)
    shape = [word(1 + dimension) for dimension in range(member.ndim)]
    item_bytes = context.get_abi_sizeof(context.get_data_type(member.dtype))
    strides, stride = [], ir.Constant(_WORD, item_bytes)
    for length in reversed(shape):
        strides.insert(0, stride)
        stride = builder.mul(stride, length)
    data = builder.inttoptr(word(0), array.data.type)
    itemsize = ir.Constant(_WORD, item_bytes)
    # Without a reference to count.
    populate_array(array, data=data, shape=shape, strides=strides, itemsize=itemsize, meminfo=None)
    return array._getvalue()
