"""An error that is kept in a variable and raised makes a cycle: its traceback holds the frame with
the variable, and the frames of the callers with their buffers, until the garbage collector runs."""

import ast

import pytest

from tests.unit.sources import modules

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _raised(function: Function) -> set[str]:
    """Return the variables that are raised, without those that `except` deletes by itself."""
    handled = {node.name for node in ast.walk(function) if isinstance(node, ast.ExceptHandler)}
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.value if isinstance(node.exc, ast.Subscript) else node.exc
            if isinstance(raised, ast.Name) and raised.id.islower() and raised.id not in handled:
                found.add(raised.id)
    return found


def _dropped(function: Function) -> set[str]:
    """Return the variables that a `finally` deletes, clears or sets to None."""
    found = set()
    for node in ast.walk(function):
        for each in node.finalbody if isinstance(node, ast.Try) else []:
            if isinstance(each, ast.Delete) or (
                isinstance(each, ast.Assign) and ast.unparse(each.value) == "None"
            ):
                found |= {ast.unparse(target) for target in each.targets}
            elif isinstance(each, ast.Expr) and ast.unparse(each).endswith(".clear()"):
                found.add(ast.unparse(each).removesuffix(".clear()"))
    return found


@pytest.mark.promise("A buffer is held until its request completes")
def test_no_function_keeps_an_error_that_it_raises() -> None:
    kept = {
        f"{name}, line {node.lineno}: {node.name}: {variable}"
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, Function)
        for variable in _raised(node) - _dropped(node)
    }
    assert kept == set()


def test_base_class_of_errors_is_never_made_itself() -> None:
    """Each error has a more precise class, as its docstring says."""
    made = [
        f"{name}, line {node.lineno}"
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "RdmaError"
    ]
    assert made == []
