"""Which faults strike a command: drawn from a bag that holds every kind that its verb can meet."""

import random
from collections.abc import Iterable

from campaign_faults import BETWEEN, ENDS_THE_COMMAND, RIVALS, STORAGE

TRIES = 3  # of a command that are struck, the second and third while they recover; then it runs undisturbed
KILLS, STOPS = ("actor killed", "driver killed"), ("actor stopped for a while", "driver stopped for a while")
TIMES = dict.fromkeys(KILLS, 3) | dict.fromkeys((*STOPS, *STORAGE), 2)  # in a bag; all others once


class Bag:
    """The kinds of faults for one stage in an order that the seed draws; filled again when it is empty.

    drawn: how many an earlier part of the campaign has taken.
    """

    def __init__(self, kinds: Iterable[str], seed: str, drawn: int = 0) -> None:
        self._kinds, self._rng, self._left = sorted(kinds), random.Random(seed), list[str]()
        for _ in range(drawn):
            self.draw()

    def draw(self) -> str:
        """The next one."""
        if not self._left:
            self._left = [kind for kind in self._kinds for _ in range(TIMES.get(kind, 1))]
            self._rng.shuffle(self._left)
        return self._left.pop()

    def put_back(self, kinds: Iterable[str]) -> None:
        """They are the next ones again."""
        self._left.extend(kinds)


def draw_tries(bag: Bag, count: int) -> list[list[str]]:
    """So many kinds for the tries of one command, as equal in number as possible.

    A try has each kind once, and at most one that ends it: the last. One that has none comes after those that have.
    """
    tries: list[list[str]] = [[] for _ in range(TRIES)]
    rest = []
    for _ in range(4 * count):  # where many end the command, some must wait
        kind = bag.draw()
        fitting = [chosen for chosen in tries if not any(_exclude(kind, other) for other in chosen)]
        if fitting:
            min(fitting, key=len).append(kind)
        else:
            rest.append(kind)
        if sum(map(len, tries)) == count:
            break
    bag.put_back(rest)
    for chosen in tries:
        chosen.sort(key=ENDS_THE_COMMAND.__contains__)
    return sorted(filter(None, tries), key=lambda chosen: chosen[-1] not in ENDS_THE_COMMAND)


def _exclude(kind: str, other: str) -> bool:
    """Whether two kinds cannot strike one try; a damaged input ends it before much else can."""
    groups = (ENDS_THE_COMMAND, RIVALS)
    return kind == other or kind in BETWEEN or other in BETWEEN or any(kind in g and other in g for g in groups)
