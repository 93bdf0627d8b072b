"""The pilots of a site, and who of them is its master: the lowest id that is believed to be alive.

There is no election to lose messages of: all who believe the same of who is alive believe the same
of who is master, within the seconds that a death takes to be known. Two masters at once assign some
tasks twice over; only the pilots' own leases count, and what is left over is given back.
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
        """Those who are here."""
        name = self.name if site is None else site
        found = self._pilots.get(name)
        if found is None:
            found = [m for m in self._members.here() if m.traits.site == name]
            self._pilots[name] = found
        return found

    def master(self, site: str) -> bytes | None:
        found = self.masters().get(site)
        return found or min((m.contact.id for m in self.pilots(site)), default=None)

    def masters(self) -> dict[str, bytes]:
        """Of every site."""
        if self._masters is None:
            found: dict[str, bytes] = {}
            for member in self._members.here():
                id, site = member.contact.id, member.traits.site
                if self._members.is_alive(id) and (site not in found or id < found[site]):
                    found[site] = id
            self._masters = found
        return self._masters
