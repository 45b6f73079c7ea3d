"""Layout: which rank of each host exchanges what with those of the others.

Hosts need not have equally many ranks. A chunk is cut wherever some host has a boundary between the
parts of two of its ranks (with hosts of 2 and 3 ranks at 1/3, 1/2 and 2/3), so that each segment
has one owner on every host, and every rank of every host takes its share.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch import Tensor


class Layout:
    """The hosts as one rank sees them. Its part of a chunk has segments.

    place: which of the n_hosts is this rank's; neighbours: the ranks there.
    n_units: a chunk has so many equal units, so that all parts and segments are made of whole ones.
    follows_tree: the ranks of each host are below one node of the tree over all ranks.
    peers: with whom this rank exchanges what: segment, host and rank. Ranks begin with different
        hosts, so that not all send to one.
    """

    def __init__(self, hosts: Sequence[Sequence[int]], rank: int) -> None:
        """hosts: the ranks of each, ascending."""
        self.n_hosts, n_ranks = len(hosts), len(hosts[0])
        in_order = [list(range(i * n_ranks, (i + 1) * n_ranks)) for i in range(len(hosts))]
        self.follows_tree = n_ranks & (n_ranks - 1) == 0 and list(map(list, hosts)) == in_order
        self.place = next(i for i, ranks in enumerate(hosts) if rank in ranks)
        self.neighbours = hosts[self.place]
        self.n_units = n = math.lcm(*map(len, hosts))
        self.peers: list[tuple[int, int, int]] = []
        self._lengths: list[int] = []  # of this rank's segments, in units
        others = [(self.place + i) % self.n_hosts for i in range(1, self.n_hosts)]
        cuts = {i * n // len(ranks) for ranks in hosts for i in range(len(ranks) + 1)}
        for begin, end in itertools.pairwise(sorted(cuts)):
            owners = [ranks[begin * len(ranks) // n] for ranks in hosts]
            if rank in owners:
                self.peers += [(len(self._lengths), host, owners[host]) for host in others]
                self._lengths.append(end - begin)

    def cut(self, part: Tensor) -> Sequence[Tensor]:
        """The segments of this rank's part of a chunk."""
        if len(self._lengths) == 1:  # always, over "group"; split() takes time
            return [part]
        unit = part.numel() // sum(self._lengths)
        segments: Sequence[Tensor] = part.split([length * unit for length in self._lengths])
        return segments
