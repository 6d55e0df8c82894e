# SPDX-License-Identifier: Apache-2.0
"""The numbers that the report needs of each update, as columns: the sums of all updates would fill the memory."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Table:
    """Some updates of a run.

    Attributes:
        columns: tensors by name, with a row for each update: ``(updates,)``, with NaN where the record has no number,
            or ``(updates, ...)``.
    """

    columns: dict[str, Tensor]

    def __len__(self) -> int:
        """Return the number of updates."""
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name: str) -> Tensor:
        """Return a column; NaN, ``(updates,)``, if the record does not have it."""
        return self.columns[name] if name in self.columns else torch.full((len(self),), math.nan, dtype=torch.float64)

    def rows(self, chosen: Tensor) -> "Table":
        """Return the updates at these indices, or those where a mask is true."""
        return Table({name: column[chosen] for name, column in self.columns.items()})

    def groups(self, labels: Sequence[int], most: int) -> list[tuple[int, int, "Table"]]:
        """Group updates of the same label, in the order in which labels appear, and join neighbors to ``most`` groups.

        Returns:
            The first and the last label of each group, and its updates.
        """
        places = {label: place for place, label in enumerate(dict.fromkeys(labels))}
        joined = max(1, -(-len(places) // most))
        place = torch.tensor([places[label] for label in labels], dtype=torch.long)
        sizes = (place // joined).bincount().tolist()
        ordered = self.rows(place.argsort(stable=True)).columns
        parts = [column.split(sizes) for column in ordered.values()]
        names, groups = list(places), []
        for k, columns in enumerate(zip(*parts, strict=True)):
            some = names[k * joined : (k + 1) * joined]
            groups.append((some[0], some[-1], Table(dict(zip(ordered, columns, strict=True)))))
        return groups

    def dicts(self, names: Iterable[str]) -> list[dict[str, float]]:
        """Return these numbers of each update by name, without those that the record does not have."""
        rows = zip(*(self[name].tolist() for name in names), strict=True)
        return [{name: value for name, value in zip(names, row, strict=True) if value == value} for row in rows]


def join(tables: Sequence[Table]) -> Table:
    """Return the updates of all tables, in order."""
    names = dict.fromkeys(name for table in tables for name in table.columns)
    return Table({name: torch.cat([table[name] for table in tables]) for name in names})
