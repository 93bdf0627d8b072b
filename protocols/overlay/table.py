"""The routing table: buckets of the `kademlia` package, with exact answers and last-seen order.

What the package gets wrong and is done here instead: `closest` is exact (it returned the first k
it met), every word from a peer moves it to the end of its bucket and takes over a changed address
(a known contact was never touched again), and one lost reply evicts nobody.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Collection
from functools import lru_cache

from kademlia.node import Node
from kademlia.routing import KBucket, RoutingTable

from ..wire.messages import ID_BYTES, Contact

#: unanswered calls in a row before a contact is dropped
STRIKES_MAX = 3
NODES_MADE_MAX = 20_000


def distance(a: bytes, b: bytes) -> int:
    return int.from_bytes(a, "big") ^ int.from_bytes(b, "big")


@lru_cache(NODES_MADE_MAX)
def _node(contact: Contact) -> Node:
    """As the package has it: the same contact comes again and again."""
    return Node(contact.id, contact.host, contact.port)


class Table:
    def __init__(self, me: bytes, bucket_size: int) -> None:
        self._me = me
        self._table = RoutingTable(None, bucket_size, Node(me))
        self._contacts: dict[bytes, Contact] = {}
        self._numbers: dict[int, Contact] = {}  # the same, by their ids as numbers
        self._touched: set[bytes] = set()  # heard of since their turn in their bucket came
        self._strikes: dict[bytes, int] = {}
        self._starts = [0]  # where the buckets begin, in their order
        self._settled: set[int] = set()  # where those begin that are full, and do not split

    def __len__(self) -> int:
        return len(self._contacts)

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._contacts

    def contacts(self) -> list[Contact]:
        return list(self._contacts.values())

    def touch(self, contact: Contact) -> bool:
        """A sign of life of one that may be in it, as it stands there."""
        if self._contacts.get(contact.id) != contact:
            return False
        self._touched.add(contact.id)
        if self._strikes:
            self._strikes.pop(contact.id, None)
        return True

    def saw(self, contact: Contact) -> Contact | None:
        """A sign of life. Returns a contact to check when the bucket is full: its oldest."""
        if contact.id == self._me or not contact.port or self.touch(contact):
            return None
        if self._strikes:
            self._strikes.pop(contact.id, None)
        node = _node(contact)
        bucket = self._bucket(node.long_id)
        enough = bucket.range[0] in self._settled and len(bucket.replacement_nodes) >= bucket.ksize
        if enough and contact.id not in self._contacts:
            return self._oldest(bucket)
        while not bucket.add_node(node):
            splits = bucket.has_in_range(self._table.node) or _depth(bucket) % 5 != 0
            if not splits:
                self._settled.add(bucket.range[0])
                return self._oldest(bucket)
            self._split(bucket)
            bucket = self._bucket(node.long_id)
        self._hold(contact)
        return None

    def _oldest(self, bucket: KBucket) -> Contact:
        """Not heard of for longest: who was heard of goes to the end once its turn comes."""
        nodes = bucket.nodes
        while (first := next(iter(nodes))) in self._touched:
            self._touched.discard(first)
            nodes.move_to_end(first)
        return self._contacts[first]

    def _hold(self, contact: Contact) -> None:
        self._contacts[contact.id] = contact
        self._numbers[int.from_bytes(contact.id, "big")] = contact

    def missed(self, peer: bytes) -> None:
        """A call that got no answer."""
        if peer not in self._contacts:
            return
        self._strikes[peer] = self._strikes.get(peer, 0) + 1
        if self._strikes[peer] >= STRIKES_MAX:
            self.remove(peer)

    def remove(self, peer: bytes) -> None:
        self._strikes.pop(peer, None)
        self._touched.discard(peer)
        contact = self._contacts.pop(peer, None)
        number = int.from_bytes(peer, "big")
        self._numbers.pop(number, None)
        bucket = self._bucket(number)
        if contact is not None or peer in bucket.replacement_nodes:
            self._settled.discard(bucket.range[0])
            bucket.remove_node(Node(peer))
            last = next(reversed(bucket.nodes.values()), None)
            if last is not None and last.id not in self._contacts:  # came up from the replacements
                self._hold(Contact(id=last.id, host=last.ip, port=last.port))

    def closest(self, target: bytes, count: int, without: Collection[bytes] = ()) -> list[Contact]:
        aim, numbers = int.from_bytes(target, "big"), self._numbers
        near = heapq.nsmallest(count + len(without), [number ^ aim for number in numbers])
        found = [numbers[far ^ aim] for far in near]
        return [contact for contact in found if contact.id not in without][:count]

    def is_among_closest(self, peer: bytes, target: bytes, count: int) -> bool:
        """Mostly it is not, and a few that are closer are soon found: not all are put in order."""
        if peer not in self._contacts:
            return False
        limit, aim = distance(peer, target), int.from_bytes(target, "big")
        for other in self._numbers:
            if other ^ aim < limit:
                count -= 1
                if not count:
                    return False
        return True

    def _bucket(self, id: int) -> KBucket:
        # the package's own search misplaces an id that equals a bucket's upper end
        bucket: KBucket = self._table.buckets[bisect_right(self._starts, id) - 1]
        return bucket

    def _split(self, bucket: KBucket) -> None:
        at = self._table.buckets.index(bucket)
        self._table.split_bucket(at)
        halves = self._table.buckets[at : at + 2]
        self._starts[at : at + 1] = [half.range[0] for half in halves]
        for half in halves:  # replacements move into free places
            for node in half.nodes.values():
                if node.id not in self._contacts:
                    self._hold(Contact(id=node.id, host=node.ip, port=node.port))


def _depth(bucket: KBucket) -> int:
    """How many bits all ids of its range have in common at their beginning: as in the Kademlia
    paper. (The package goes by those that happen to be in it, and compares strings.)"""
    lowest, highest = bucket.range
    width: int = highest - lowest + 1
    return ID_BYTES * 8 + 1 - width.bit_length()
