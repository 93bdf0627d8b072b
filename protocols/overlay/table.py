"""The routing table: buckets of the `kademlia` package, with exact answers and last-seen order.

What the package gets wrong and is done here instead: `closest` is exact (it returned the first k
it met), every word from a peer moves it to the end of its bucket and takes over a changed address
(a known contact was never touched again), and one lost reply evicts nobody.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable

from kademlia.node import Node
from kademlia.routing import KBucket, RoutingTable

from ..messages import ID_BYTES, Contact

#: unanswered calls in a row before a contact is dropped
STRIKES_MAX = 3


def distance(a: bytes, b: bytes) -> int:
    return int.from_bytes(a, "big") ^ int.from_bytes(b, "big")


class Table:
    def __init__(self, me: bytes, bucket_size: int) -> None:
        self._me = me
        self._table = RoutingTable(None, bucket_size, Node(me))
        self._contacts: dict[bytes, Contact] = {}
        self._strikes: dict[bytes, int] = {}
        self._starts = [0]  # where the buckets begin, in their order

    def __len__(self) -> int:
        return len(self._contacts)

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._contacts

    def contacts(self) -> list[Contact]:
        return list(self._contacts.values())

    def saw(self, contact: Contact) -> Contact | None:
        """A sign of life. Returns a contact to check when the bucket is full: its oldest."""
        if contact.id == self._me or not contact.port:
            return None
        self._strikes.pop(contact.id, None)
        node = Node(contact.id, contact.host, contact.port)
        bucket = self._bucket(node)
        while not bucket.add_node(node):
            splits = bucket.has_in_range(self._table.node) or _depth(bucket) % 5 != 0
            if not splits:
                oldest: Contact = self._contacts[bucket.head().id]
                return oldest
            self._table.split_bucket(self._table.buckets.index(bucket))
            self._index()
            bucket = self._bucket(node)
        self._contacts[contact.id] = contact
        return None

    def missed(self, peer: bytes) -> None:
        """A call that got no answer."""
        if peer not in self._contacts:
            return
        self._strikes[peer] = self._strikes.get(peer, 0) + 1
        if self._strikes[peer] >= STRIKES_MAX:
            self.remove(peer)

    def remove(self, peer: bytes) -> None:
        self._strikes.pop(peer, None)
        contact = self._contacts.pop(peer, None)
        node = Node(peer)
        bucket = self._bucket(node)
        if contact is not None or node.id in bucket.replacement_nodes:
            bucket.remove_node(node)
            for other in bucket.get_nodes():  # one may have come up from the replacements
                if other.id not in self._contacts:
                    self._contacts[other.id] = Contact(id=other.id, host=other.ip, port=other.port)

    def closest(self, target: bytes, count: int, without: Iterable[bytes] = ()) -> list[Contact]:
        left_out = set(without)
        found = (c for c in self._contacts.values() if c.id not in left_out)
        return heapq.nsmallest(count, found, key=lambda c: distance(c.id, target))

    def _bucket(self, node: Node) -> KBucket:
        # the package's own search misplaces an id that equals a bucket's upper end
        index = bisect_right(self._starts, node.long_id) - 1
        bucket: KBucket = self._table.buckets[index]
        return bucket

    def _index(self) -> None:
        self._starts = [bucket.range[0] for bucket in self._table.buckets]
        # a split moves replacements into free places
        self._contacts = {
            node.id: self._contacts.get(node.id)
            or Contact(id=node.id, host=node.ip, port=node.port)
            for bucket in self._table.buckets
            for node in bucket.get_nodes()
        }


def _depth(bucket: KBucket) -> int:
    """How many bits all its ids have in common at their beginning; the package compares strings."""
    ids: list[int] = [node.long_id for node in bucket.nodes.values()]
    return ID_BYTES * 8 - (min(ids) ^ max(ids)).bit_length()
