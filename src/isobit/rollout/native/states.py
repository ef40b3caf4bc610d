"""What a forward leaves of its tokens: final hidden states, and digests of their experts."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """Of T tokens; or of one, without the first dimension."""

    hidden: Tensor
    """[T, hidden]"""
    routings: Tensor | None = None
    """int64 [T] (``isobit.models.routes``); None for a model without experts."""

    def take(self, rows: Tensor) -> "States":
        """The tokens ``rows``, int64 [N]."""
        routings = self.routings
        return States(
            self.hidden.index_select(0, rows),
            None if routings is None else routings.index_select(0, rows),
        )

    def row(self, index: int) -> "States":
        """One token."""
        return States(self.hidden[index], None if self.routings is None else self.routings[index])

    def clone(self) -> "States":
        """A copy: a row would keep the whole forward alive."""
        routings = self.routings
        return States(self.hidden.clone(), None if routings is None else routings.clone())
