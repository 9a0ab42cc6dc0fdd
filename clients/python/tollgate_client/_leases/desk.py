"""Where handles meet the keeper of their leases."""

from __future__ import annotations

from .._keep import desk
from ..errors import InvalidRequestError
from .resource import Resource

_LONGEST_NAME = 1024
"""The most bytes of a resource's name."""


class Desk(desk.Desk[Resource]):
    """The resources of one client that have handles."""

    def add(self, resource: Resource) -> bool:
        """Adds a resource. Returns whether a keeper has to be started."""
        try:
            length = len(resource.name.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"invalid request: {error}") from error
        if not 1 <= length <= _LONGEST_NAME:
            raise InvalidRequestError("invalid request: the name of a resource has 1 to 1024 bytes")
        return super().add(resource)

    def hurry(self, resource: Resource) -> None:
        """Has a lease refreshed soon, not at its time."""
        if not resource.is_urgent:
            resource.is_urgent = True
            self.wake()
