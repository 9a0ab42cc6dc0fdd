from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EndSessionRequest(_message.Message):
    __slots__ = ["resource", "session"]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    resource: str
    session: str
    def __init__(self, resource: _Optional[str] = ..., session: _Optional[str] = ...) -> None: ...

class EndSessionResponse(_message.Message):
    __slots__ = ["released"]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: int
    def __init__(self, released: _Optional[int] = ...) -> None: ...

class HeldByGroup(_message.Message):
    __slots__ = ["held", "limit", "name"]
    HELD_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    held: int
    limit: int
    name: str
    def __init__(self, name: _Optional[str] = ..., limit: _Optional[int] = ..., held: _Optional[int] = ...) -> None: ...

class Hold(_message.Message):
    __slots__ = ["copies", "domain", "hold"]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    copies: int
    domain: str
    hold: str
    def __init__(self, hold: _Optional[str] = ..., domain: _Optional[str] = ..., copies: _Optional[int] = ...) -> None: ...

class KeepAliveRequest(_message.Message):
    __slots__ = ["sessions"]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionToRenew]
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionToRenew, _Mapping]]] = ...) -> None: ...

class KeepAliveResponse(_message.Message):
    __slots__ = ["degraded", "sessions"]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    degraded: bool
    sessions: _containers.RepeatedCompositeFieldContainer[RenewedSession]
    def __init__(self, sessions: _Optional[_Iterable[_Union[RenewedSession, _Mapping]]] = ..., degraded: bool = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ["hold", "keep", "resource", "session"]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    hold: str
    keep: int
    resource: str
    session: str
    def __init__(self, resource: _Optional[str] = ..., session: _Optional[str] = ..., hold: _Optional[str] = ..., keep: _Optional[int] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ["degraded", "left"]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    degraded: bool
    left: int
    def __init__(self, left: _Optional[int] = ..., degraded: bool = ...) -> None: ...

class RenewedSession(_message.Message):
    __slots__ = ["alive", "expires_at_unix_millis", "holds", "resource", "session"]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_UNIX_MILLIS_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    alive: bool
    expires_at_unix_millis: int
    holds: _containers.RepeatedCompositeFieldContainer[Hold]
    resource: str
    session: str
    def __init__(self, resource: _Optional[str] = ..., session: _Optional[str] = ..., alive: bool = ..., expires_at_unix_millis: _Optional[int] = ..., holds: _Optional[_Iterable[_Union[Hold, _Mapping]]] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ["copies", "domain", "hold", "min_copies", "resource", "session", "session_ttl_millis"]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    MIN_COPIES_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_TTL_MILLIS_FIELD_NUMBER: _ClassVar[int]
    copies: int
    domain: str
    hold: str
    min_copies: int
    resource: str
    session: str
    session_ttl_millis: int
    def __init__(self, resource: _Optional[str] = ..., session: _Optional[str] = ..., session_ttl_millis: _Optional[int] = ..., hold: _Optional[str] = ..., domain: _Optional[str] = ..., copies: _Optional[int] = ..., min_copies: _Optional[int] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ["all_held", "degraded", "domain_held", "domain_limit", "global_limit", "granted", "groups", "retry_after_millis", "shadow", "status"]
    class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = []
    ALL_HELD_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_HELD_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_LIMIT_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_LIMIT_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    OK: ReserveResponse.Status
    REJECTED: ReserveResponse.Status
    RETRY_AFTER_MILLIS_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    all_held: int
    degraded: bool
    domain_held: int
    domain_limit: int
    global_limit: int
    granted: int
    groups: _containers.RepeatedCompositeFieldContainer[HeldByGroup]
    retry_after_millis: int
    shadow: bool
    status: ReserveResponse.Status
    def __init__(self, status: _Optional[_Union[ReserveResponse.Status, str]] = ..., granted: _Optional[int] = ..., domain_limit: _Optional[int] = ..., global_limit: _Optional[int] = ..., domain_held: _Optional[int] = ..., all_held: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[HeldByGroup, _Mapping]]] = ..., retry_after_millis: _Optional[int] = ..., degraded: bool = ..., shadow: bool = ...) -> None: ...

class SessionToRenew(_message.Message):
    __slots__ = ["resource", "session", "ttl_millis"]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TTL_MILLIS_FIELD_NUMBER: _ClassVar[int]
    resource: str
    session: str
    ttl_millis: int
    def __init__(self, resource: _Optional[str] = ..., session: _Optional[str] = ..., ttl_millis: _Optional[int] = ...) -> None: ...

class TransferRequest(_message.Message):
    __slots__ = ["copies", "hold", "resource", "session", "to_session", "ttl_millis"]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TO_SESSION_FIELD_NUMBER: _ClassVar[int]
    TTL_MILLIS_FIELD_NUMBER: _ClassVar[int]
    copies: int
    hold: str
    resource: str
    session: str
    to_session: str
    ttl_millis: int
    def __init__(self, resource: _Optional[str] = ..., session: _Optional[str] = ..., hold: _Optional[str] = ..., copies: _Optional[int] = ..., to_session: _Optional[str] = ..., ttl_millis: _Optional[int] = ...) -> None: ...

class TransferResponse(_message.Message):
    __slots__ = ["moved"]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    moved: int
    def __init__(self, moved: _Optional[int] = ...) -> None: ...
