"""The routing table: buckets of the `kademlia` package, with exact answers and last-seen order.

This table corrects three things in the package: `closest` is exact (the package returns the first k
it meets); every message from a peer moves it to the end of its bucket and updates its address (the
package never touches a known contact again); and one lost reply evicts nobody.
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
    """The package's form of a contact; the same one comes again and again."""
    return Node(contact.id, contact.host, contact.port)


class Table:
    def __init__(self, me: bytes, bucket_size: int) -> None:
        self._me = me
        self._table = RoutingTable(None, bucket_size, Node(me))
        self._contacts: dict[bytes, Contact] = {}
        self._numbers: dict[int, Contact] = {}  # the same contacts by their ids as numbers
        self._touched: set[bytes] = set()  # heard from since they were last moved in their bucket
        self._strikes: dict[bytes, int] = {}
        self._starts = [0]  # of the buckets, in their order
        self._settled: set[int] = set()  # starts of buckets that are full and do not split

    def __len__(self) -> int:
        return len(self._contacts)

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._contacts

    def contacts(self) -> list[Contact]:
        return list(self._contacts.values())

    def touch(self, contact: Contact) -> bool:
        """Note a sign of life, if exactly this contact is in the table."""
        if self._contacts.get(contact.id) != contact:
            return False
        self._touched.add(contact.id)
        if self._strikes:
            self._strikes.pop(contact.id, None)
        return True

    def saw(self, contact: Contact) -> Contact | None:
        """Add a contact that gave a sign of life. If its bucket is full: the contact to check, its
        oldest."""
        if contact.id == self._me or not contact.port or self.touch(contact):
            return None
        if self._strikes:
            self._strikes.pop(contact.id, None)
        node = _node(contact)
        bucket = self._bucket(node.long_id)
        if contact.id not in self._contacts and self._is_overfull(bucket):
            return self._oldest(bucket)
        while not bucket.add_node(node):
            if not self._may_split(bucket):
                self._settled.add(bucket.range[0])
                return self._oldest(bucket)
            self._split(bucket)
            bucket = self._bucket(node.long_id)
        self._hold(contact)
        return None

    def _is_overfull(self, bucket: KBucket) -> bool:
        """It will not split, and has as many replacements as it has use for."""
        return bucket.range[0] in self._settled and len(bucket.replacement_nodes) >= bucket.ksize

    def _may_split(self, bucket: KBucket) -> bool:
        return bool(bucket.has_in_range(self._table.node)) or _depth(bucket) % 5 != 0

    def _oldest(self, bucket: KBucket) -> Contact:
        """The contact not heard from for longest. (Those heard from move to the end only here.)"""
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
            if last is not None and last.id not in self._contacts:  # it was a replacement
                self._hold(Contact(id=last.id, host=last.ip, port=last.port))

    def closest(self, target: bytes, count: int, without: Collection[bytes] = ()) -> list[Contact]:
        aim, numbers = int.from_bytes(target, "big"), self._numbers
        near = heapq.nsmallest(count + len(without), [number ^ aim for number in numbers])
        contacts = [numbers[far ^ aim] for far in near]
        return [contact for contact in contacts if contact.id not in without][:count]

    def is_among_closest(self, peer: bytes, target: bytes, count: int) -> bool:
        """Usually it is not, and a few closer peers turn up soon: so nothing is sorted."""
        if peer not in self._contacts:
            return False
        limit, aim = distance(peer, target), int.from_bytes(target, "big")
        for other in self._numbers:
            if other ^ aim < limit:
                count -= 1
                if not count:
                    return False
        return True

    def _bucket(self, number: int) -> KBucket:
        # the package's own search misplaces an id that equals a bucket's upper end
        bucket: KBucket = self._table.buckets[bisect_right(self._starts, number) - 1]
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
    """The number of leading bits that all ids of the bucket's range share, as in the Kademlia
    paper. (The package compares the ids that happen to be in it, as strings.)"""
    lowest, highest = bucket.range
    width: int = highest - lowest + 1
    return ID_BYTES * 8 + 1 - width.bit_length()
