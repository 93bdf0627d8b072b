"""The pilots of a site and its master, which is the pilot with the lowest id among those alive.

There is no election whose messages could be lost: peers that agree on which peers are alive agree
on the master, within the seconds that a death takes to be known. Two masters at once assign some
tasks twice; only the pilots' own leases count, and those left over are returned.
"""

from __future__ import annotations

from ...membership.members import Members
from ...wire.messages import Member


class SiteView:
    def __init__(self, members: Members) -> None:
        self._members = members
        self._pilots: dict[str, list[Member]] = {}
        self._masters: dict[str, bytes] | None = None
        members.listen(self._changed)

    def _changed(self, old: Member | None, new: Member) -> None:
        self._pilots.clear()
        self._masters = None

    @property
    def name(self) -> str:
        return self._members.me.traits.site

    def pilots(self, site: str | None = None) -> list[Member]:
        """The members of a site that have not left."""
        name = self.name if site is None else site
        pilots = self._pilots.get(name)
        if pilots is None:
            pilots = [m for m in self._members.here() if m.traits.site == name]
            self._pilots[name] = pilots
        return pilots

    def master(self, site: str) -> bytes | None:
        alive = self.masters().get(site)
        return alive or min((m.contact.id for m in self.pilots(site)), default=None)

    def masters(self) -> dict[str, bytes]:
        """The master of every site."""
        if self._masters is None:
            masters: dict[str, bytes] = {}
            for member in self._members.here():
                peer, site = member.contact.id, member.traits.site
                if self._members.is_alive(peer) and (site not in masters or peer < masters[site]):
                    masters[site] = peer
            self._masters = masters
        return self._masters
