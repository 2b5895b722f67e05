"""Keeps torch.compile out of what a process group does.

C++ calls the methods of a group, and a script may have compiled what called the C++: then Dynamo
would compile each of them and what they call, and knows of a process group only PyTorch's own
attributes.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

from torch._C._dynamo import eval_frame

_Class = TypeVar("_Class", bound=type)


def not_compiled(cls: _Class) -> _Class:
    """A class whose methods run as they are written, and so does all that they call.

    Unlike torch.compiler.disable it costs a call nothing, and does not import Dynamo.
    """
    as_written = eval_frame._FrameExecStrategy(
        eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP
    )
    for member in vars(cls).values():
        if isinstance(member, FunctionType):
            eval_frame.set_code_exec_strategy(member.__code__, as_written)
    return cls
