"""An environment with a calculator, ``environment.class = "calculator"``."""

import ast
import operator
from collections.abc import Callable
from typing import Any, ClassVar

_LONGEST = 200
"""Characters of an expression."""
_LARGEST = 10**50


class Calculator:
    """Arithmetic; nothing is kept between calls."""

    _BINARY: ClassVar[dict[type, Callable[[Any, Any], Any]]] = {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
    }

    def calculate(self, expression: str) -> str:
        """Work out an arithmetic expression.

        Args:
            expression: Numbers with +, -, *, /, //, % and brackets, such as "(3 + 4) * 12".

        Returns:
            The result, as a number.
        """
        if len(expression) > _LONGEST:
            raise ValueError(f"an expression has at most {_LONGEST} characters")
        try:
            tree = ast.parse(expression.strip(), mode="eval").body
        except SyntaxError as error:
            raise ValueError(f"{expression!r} is no arithmetic expression") from error
        value = self._value(tree)
        is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
        return str(int(value) if is_whole else value)

    def multiply(self, a: int, b: int) -> int:
        """Multiply two whole numbers.

        Args:
            a: The first factor.
            b: The second factor.

        Returns:
            The product.
        """
        return self._bounded(int(a) * int(b))

    def _value(self, node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return self._bounded(value)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(operand)
            case ast.BinOp(op=op, left=left, right=right) if type(op) in self._BINARY:
                return self._bounded(self._BINARY[type(op)](self._value(left), self._value(right)))
        raise ValueError(f"{ast.unparse(node):.40} is no number, +, -, *, /, // or %")

    @staticmethod
    def _bounded(value: Any) -> Any:
        if abs(value) > _LARGEST:
            raise ValueError("a number is larger than 10^50")
        return value
