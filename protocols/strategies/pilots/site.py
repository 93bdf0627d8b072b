"""The pilots of a site, and who of them is its master: the lowest id that is believed to be alive.

There is no election to lose messages of: all who believe the same of who is alive believe the same
of who is master, within the seconds that a death takes to be known. Two masters at once assign some
tasks twice over; only the pilots' own leases count, and what is left over is given back.
"""

from __future__ import annotations

from ...members import Members
from ...messages import Member


class Site:
    def __init__(self, members: Members) -> None:
        self._members = members

    @property
    def name(self) -> str:
        return self._members.me.traits.site

    def pilots(self, site: str | None = None) -> list[Member]:
        """Those who are here."""
        name = self.name if site is None else site
        return [m for m in self._members.here() if m.traits.site == name]

    def master(self, site: str) -> bytes | None:
        alive = [m.contact.id for m in self.pilots(site) if self._members.is_alive(m.contact.id)]
        found = min(alive, default=None)
        return (
            found
            if found is not None
            else min((m.contact.id for m in self.pilots(site)), default=None)
        )

    def masters(self) -> dict[str, bytes]:
        """Of every site."""
        found: dict[str, bytes] = {}
        for member in self._members.here():
            id, site = member.contact.id, member.traits.site
            if self._members.is_alive(id) and (site not in found or id < found[site]):
                found[site] = id
        return found
