"""LaTeX to sympy's expressions, without ``eval``.

The grammar is that of latex2sympy2_extended, as math-verify uses it.  Where it meets a number it
calls ``sympy.Number(text)``, and sympy reads text by executing it; here numbers are made from their
digits.
"""

import re
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy, normalize_latex
from math_verify import LatexExtractionConfig
from math_verify.grader import should_treat_as_complex
from math_verify.parser import get_last_eq

THOUSANDS = re.compile(r"\s*-?\d{1,3}(?:,\d{3})+(?:\.\d+)?\s*")
NORMALISED = LatexExtractionConfig().normalization_config


class _Reader(_Latex2Sympy):
    def parse_number(self, text: str) -> sympy.Number:
        digits = text.replace(",", "")
        return sympy.Integer(int(digits)) if digits.isdigit() else sympy.Float(digits)


def read(text: str) -> Any:
    """The expression of ``text``, or of the last part of its chain of equations; None for what is
    none.

    Raises RecursionError, MemoryError; ``text`` must be within `math_bounds`.
    """
    try:
        latex = normalize_latex(text, NORMALISED)
    except Exception:  # what it meets in the library is not ours to know
        return None
    for part in dict.fromkeys((latex, get_last_eq(latex))):
        if THOUSANDS.fullmatch(part):
            part = part.replace(",", "")
        try:
            return _Reader(None, not should_treat_as_complex(part)).parse(part)
        except (RecursionError, MemoryError):
            raise
        except Exception:  # the grammar raises bare exceptions, sympy almost any  # noqa: S112
            continue
    return None
