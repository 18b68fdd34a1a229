"""A model's own code with a part exchanged: where the part is, statement for statement, what
attnplug knows."""

import ast
import copy
import functools
import inspect
import textwrap
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from attnplug.errors import UnsupportedCallError

Forward = Callable[..., Any]


def run_rewritten(made: Forward | None, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the rewritten forward of a module's class. Raises UnsupportedCallError where `made` is
    None: the class has another forward now than the one that was rewritten."""
    if made is None:
        raise UnsupportedCallError(
            f"the code of {type(module).__name__} was changed after attnplug.apply. Call "
            "attnplug.remove(model) and apply again."
        )
    return made(module, *args, **kwargs)


def body_of(forward: Any) -> tuple[ast.FunctionDef, list[str]] | None:
    """A function and the texts of its statements, as ast.unparse writes them; None where it is no
    function of Python with a source of its own. What is given is kept and not to be changed."""
    if not isinstance(forward, FunctionType):
        return None
    return _body_of(forward.__code__, forward.__code__.co_filename)


@functools.cache  # many layers have the same forward, and each `apply` looks at all of them
def _body_of(code: CodeType, file: str) -> tuple[ast.FunctionDef, list[str]] | None:
    """By its code: inspect looks for what a function wraps. Code of two files may be equal."""
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    except (OSError, SyntaxError):  # without a file, or a lambda amid an expression
        return None
    if not isinstance(function, ast.FunctionDef):
        return None
    return function, [ast.unparse(statement) for statement in function.body]


def rewritten(forward: Any, function: ast.FunctionDef, part: slice, code: str) -> Forward:
    """`forward`, whose source is `function`, with `code` in the place of a part of its
    statements."""
    function = copy.deepcopy(function)
    function.body[part] = ast.parse(code).body
    function.decorator_list = []
    function.returns = None
    for argument in (*function.args.args, *function.args.kwonlyargs):
        argument.annotation = None
    if function.args.kwarg is not None:
        function.args.kwarg.annotation = None
    tree = ast.fix_missing_locations(ast.Module([function], []))
    space: dict[str, Any] = {}
    exec(compile(tree, f"<attnplug: {forward.__qualname__}>", "exec"), space)
    made = FunctionType(
        space[function.name].__code__, forward.__globals__, function.name, forward.__defaults__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made
