"""Cutting splits off a labeled set: whole groups, such as patients, and a like share of every class."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def cut(
    labels: Sequence[str], groups: Sequence[Any], shares: Mapping[str, float], seed: int, unit: str = "groups"
) -> dict[str, list[int]]:
    """Rows of each split in `shares` and of what stays labeled: whole groups, a like share of every class."""
    members: dict[Any, list[int]] = defaultdict(list)
    for row, group in enumerate(groups):
        members[group].append(row)
    contents = {group: Counter(labels[row] for row in rows) for group, rows in members.items()}
    available = Counter(label for content in contents.values() for label in content)
    label, count = min(available.items(), key=lambda item: item[1])
    if count <= len(shares):
        raise ValueError(
            f"Cutting {' and '.join(shares)} from labeled needs {len(shares) + 1} {unit} of every class, but "
            f"{label!r} has {count}: add images, or give {' and '.join(f'{name}=' for name in shares)}."
        )
    random, left = np.random.RandomState(seed), sorted(members)
    parts: dict[str, list[int]] = {}
    for later, (name, share) in zip(range(len(shares), 0, -1), shares.items(), strict=True):
        goals = {label: max(1, round(share * count)) for label, count in Counter(labels).items()}
        taken = take(left, contents, goals, later, random)
        if not taken:
            raise ValueError(
                f"The groups cannot be cut so that labeled and {' and '.join(shares)} have images of every "
                f"class: add groups, or give {name}=."
            )
        left = [group for group in left if group not in taken]
        parts[name] = sorted(row for group in taken for row in members[group])
    return parts | {"labeled": sorted(row for group in left for row in members[group])}


def take(
    groups: Sequence[Any],
    contents: Mapping[Any, Counter[str]],
    goals: Mapping[str, int],
    later: int,
    random: np.random.RandomState,
) -> set[Any]:
    """Groups for one split: of twenty random choices the one nearest to the goals; none if all fail.

    Args:
        contents: images of each class, for every group.
        goals: wanted images of each class; one at least is taken, however large its group.
        later: how many groups of every class the splits after this one need.
    """
    best: set[Any] = set()
    smallest = float("inf")
    for _ in range(20):
        taken = take_in_order([groups[n] for n in random.permutation(len(groups))], contents, goals, later)
        counts = Counter(itertools.chain.from_iterable(contents[group].elements() for group in taken))
        distance = sum((counts[label] / goal - 1) ** 2 for label, goal in goals.items())
        if distance < smallest and len(counts) == len(goals):
            best, smallest = taken, distance
        if distance == 0:  # always, if each image is a group
            break
    return best


def take_in_order(
    order: Sequence[Any], contents: Mapping[Any, Counter[str]], goals: Mapping[str, int], later: int
) -> set[Any]:
    """Rare classes first: every group that brings the split nearer to its goals, and at least one each."""
    counts: Counter[str] = Counter()
    left = Counter(label for group in order for label in contents[group])
    owners: dict[str, list[Any]] = defaultdict(list)
    for group in order:
        for label in contents[group]:
            owners[label].append(group)
    taken: set[Any] = set()

    def cost(group: Any) -> float:  # change of the squared distance to the goals, in units of these
        sizes = contents[group].items()
        return sum(
            size * (size + 2 * (counts[label] - goals[label])) / goals[label] ** 2 for label, size in sizes
        )

    def spare(group: Any) -> bool:
        return group not in taken and all(left[label] > later for label in contents[group])

    def add(group: Any) -> None:
        taken.add(group)
        counts.update(contents[group])
        left.subtract(dict.fromkeys(contents[group], 1))

    for label in sorted(goals, key=lambda label: (goals[label], label)):
        for group in owners[label]:
            if counts[label] < goals[label] and spare(group) and cost(group) < 0:
                add(group)
        possible = [] if counts[label] else [group for group in owners[label] if spare(group)]
        if possible:
            add(min(possible, key=cost))
    return taken
