"""Keeps Dynamo (torch.compile) from tracing the methods of a process group.

C++ calls these methods, possibly from a frame that a script has compiled. Dynamo would then compile
them and all they call, and it knows only those attributes of a process group that are PyTorch's.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

from torch._C._dynamo import eval_frame

_Class = TypeVar("_Class", bound=type)


def skip_dynamo(cls: _Class) -> _Class:
    """Class decorator: run the methods, and all that they call, in eager mode.

    Unlike torch.compiler.disable it adds nothing to a call, and does not import Dynamo.
    """
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for member in vars(cls).values():
        if isinstance(member, FunctionType):
            eval_frame.set_code_exec_strategy(member.__code__, skip)
    return cls
